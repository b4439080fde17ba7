"""Prompt lookup: what is proposed after which text."""

import random

import pytest

from outrider.actors.drafter.ngram import NgramIndex, NgramProposer
from outrider.actors.round.length import LengthController
from outrider.cluster.link.messages import Commit, DraftOrigin, DraftSampling, ProposalStatus
from outrider.cluster.modes import Mode
from tests.unit.drafter.drive import Drive, Told

KEY, OTHER = (1, 1), (2, 1)
SAMPLING = DraftSampling(Mode.REJECTION, temperature=1.0)


def index_of(tokens, min_n, max_n):
    index = NgramIndex(min_n, max_n)
    index.append(tokens)
    return index


def reference_lookup(tokens, min_n, max_n, count):
    """The rule, written without an index: longest suffix first, its latest earlier occurrence, loops continued."""
    for n in range(max_n, min_n - 1, -1):
        for start in range(len(tokens) - n - 1, -1, -1):
            if tokens[start : start + n] == tokens[len(tokens) - n :]:
                text = list(tokens)
                for _ in range(count):
                    text.append(text[start + n + len(text) - len(tokens)])
                return text[len(tokens) :]
    return []


@pytest.mark.parametrize("seed", range(20))
def test_the_index_gives_what_searching_the_text_gives(seed):
    chance = random.Random(seed)
    min_n = chance.randint(1, 3)
    max_n = chance.randint(min_n, 5)
    tokens = [chance.randrange(4) for _ in range(chance.randint(1, 60))]
    index = index_of(tokens, min_n, max_n)
    for _ in range(30):
        count = chance.randint(1, 6)
        assert index.lookup(count) == reference_lookup(tokens, min_n, max_n, count)
        more = [chance.randrange(4) for _ in range(chance.randint(1, 5))]
        tokens += more
        index.append(more)


def commit(key, base, tokens, k):
    return Commit(key[1], base, tokens, k, k)


def test_a_proposer_answers_each_commit_at_once_at_its_own_length_and_k():
    proposer = Drive(NgramProposer(2, 4))
    assert proposer.open(KEY, [1, 2, 3, 1], 4, SAMPLING) == Told(KEY, 4, [], ProposalStatus.READY)
    proposer.open(OTHER, [5, 6, 5], 4, SAMPLING)
    drafted = proposer.commit(KEY, commit(KEY, 4, [2], 4))
    assert drafted == [Told(KEY, 5, [3, 1, 2, 3], ProposalStatus.OK, origin=DraftOrigin.MAIN_LINE)]
    assert proposer.commit(OTHER, commit(OTHER, 3, [6], 1))[0].token_ids == [5]
    assert proposer.commit(KEY, commit(KEY, 5, [3, 9], 4))[0].token_ids == []
    assert proposer.commit(OTHER, commit(OTHER, 4, [5], 0)) == []
    assert proposer.commit(OTHER, commit(OTHER, 5, [6], 2))[0].token_ids == [5, 6]
    assert proposer.usage()["num_sequences"] == 2
    proposer.close(OTHER)
    proposer.close(OTHER)
    assert proposer.usage()["num_sequences"] == 1


def test_look_ups_for_many_requests_go_on():
    """They take no step that a round would wait for, so they count as hits."""
    proposer, controller = Drive(NgramProposer(2, 4)), LengthController(4)
    requests = {(0, number): controller.track(4) for number in range(12)}
    lengths = dict.fromkeys(requests, 9)
    for key in requests:
        proposer.open(key, [1, 2, 3, 1, 2, 3, 1, 2, 3], 4, SAMPLING)
    for _ in range(200):
        for (key, request), wanted in zip(requests.items(), controller.choose(list(requests.values())), strict=True):
            start = lengths[key]
            lengths[key] += wanted.k + 1
            committed = [position % 3 + 1 for position in range(start, lengths[key])]
            controller.observe_round(request, wanted.k, wanted.k)
            for answer in proposer.commit(key, Commit(key[1], start, committed, wanted.k, wanted.k_miss)):
                controller.observe_answer(request, answer.origin, len(answer.token_ids), 0.0, 0.0)
        controller.observe_step(12 + sum(request.chosen.k for request in requests.values()), 0.025)
    assert controller.snapshot()["speculating"]
