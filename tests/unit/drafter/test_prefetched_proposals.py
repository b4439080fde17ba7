"""What a drafter sends for outcomes of a round that is still being verified."""

import itertools
import random
from dataclasses import replace

import pytest

from outrider.actors.drafter.draft_model import DraftModelProposer
from outrider.actors.drafter.lookup_drafters import LookupDrafters
from outrider.actors.drafter.loop import DraftLoop
from outrider.actors.drafter.ngram import NgramProposer
from outrider.cluster.link.messages import Commit, DraftOrigin, DraftSampling, PrefetchedProposal, Proposals
from outrider.cluster.modes import Mode
from tests.unit.drafter.draft_bench import GREEDY, KEY, SAMPLED, Bench, ids
from tests.unit.drafter.drive import Drive, prompt_of
from tests.unit.drafter.scripted_proposer import Sink
from tests.unit.drafting_engine import MemoryEngine, continuation, drawn_token, lookahead

PROMPT = [1, 2, 3]
COUPLED = DraftSampling(Mode.COUPLED, temperature=0.8, seed=5, top_n=0)


class Foreseeing(Bench):
    """Keeps what is sent ahead, and takes it as a verifier does."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.ahead = {}

    def step(self):
        answers = super().step()
        for key, ahead in self.proposer.prefetched:
            self.ahead[key, ahead.base_committed_len, ahead.position, ahead.next_token] = ahead
        self.proposer.prefetched.clear()
        return answers

    def take(self, key, tokens, k=4):
        """Commits; the drafts that are there already, or None and the drafter is asked."""
        base = len(self.texts[key])
        ahead = self.ahead.get((key, base, base + len(tokens) - 1, tokens[-1]))
        if ahead is None or len(ahead.token_ids) < k:
            return None
        self.texts[key] += tokens
        assert self.proposer.commit(key, Commit(key[1], base, tokens, k, k, True)) == []
        return list(ahead.token_ids[:k])


@pytest.fixture(params=[GREEDY, COUPLED, replace(SAMPLED, top_n=0)], ids=["greedy", "coupled", "one-hot q"])
def bench(request):
    return Foreseeing().opened(PROMPT, request.param)


def first_drafts(bench):
    """Return the first round's drafts, with everything drafted ahead for what follows it."""
    answer = bench.answer(KEY, [drawn_token(PROMPT)])
    bench.ahead.clear()
    bench.settle()
    return ids(answer)


def test_every_outcome_s_drafts_are_sent_once_and_are_what_would_be_answered(bench):
    drafts = first_drafts(bench)
    text = list(bench.texts[KEY])
    assert len(bench.ahead) > 4
    for (_, base, position, token), ahead in bench.ahead.items():
        accepted = position - base
        assert base == len(text)
        assert list(ahead.token_ids) == continuation([*text, *drafts[:accepted], token], 4)
        on_main_line = accepted == len(drafts) and token == drawn_token([*text, *drafts])
        assert ahead.origin is (DraftOrigin.MAIN_LINE if on_main_line else DraftOrigin.SIDE_BRANCH)
    assert sum(ahead.origin is DraftOrigin.MAIN_LINE for ahead in bench.ahead.values()) == 1


@pytest.mark.parametrize("seed", range(8))
def test_rounds_that_take_what_was_sent_and_rounds_that_ask_draft_the_same(bench, seed):
    """Alternatives that nobody foresees among the outcomes, and fewer drafts wanted than there are."""
    rng = random.Random(seed)
    drafts, taken = first_drafts(bench), 0
    for _ in range(30):
        accepted = rng.randint(0, len(drafts))
        text = [*bench.texts[KEY], *drafts[:accepted]]
        # The likeliest token is the draft itself, where there is one.
        rank = rng.choice([1, 2, 7]) if accepted < len(drafts) else rng.choice([0, 0, 1, 7])
        tokens, k = [*drafts[:accepted], drawn_token(text, rank=rank)], rng.randint(1, 4)
        for _ in range(rng.randint(0, 8)):
            bench.step()
        drafts = bench.take(KEY, tokens, k)
        taken += drafts is not None
        if drafts is None:
            answer = bench.answer(KEY, tokens, k)
            answers = [answer] if answer else bench.settle()
            drafts = ids(answers[-1])
        assert drafts == bench.drafts(KEY, k)
    assert taken > 3


def test_a_branch_that_was_given_up_after_it_was_sent_costs_nothing(bench):
    drafts = first_drafts(bench)
    sequence = bench.proposer.sequences[KEY]
    side = next(ahead for ahead in bench.ahead.values() if ahead.origin is DraftOrigin.SIDE_BRANCH)
    sequence.drop_everything()
    accepted = side.position - side.base_committed_len
    assert bench.take(KEY, [*drafts[:accepted], side.next_token]) == list(side.token_ids)
    bench.settle()
    text = list(bench.texts[KEY])
    bonus = drawn_token([*text, *side.token_ids])
    assert bench.take(KEY, [*side.token_ids, bonus]) == continuation([*text, *side.token_ids, bonus], 4)


def test_drafts_with_a_q_are_answered_and_never_sent_ahead():
    bench = Foreseeing().opened(PROMPT, SAMPLED)
    first_drafts(bench)
    assert bench.ahead == {}


def test_where_somebody_decides_at_each_commit_who_answers_nothing_is_sent_ahead():
    clock = itertools.count().__next__
    model = DraftModelProposer(MemoryEngine(), 16, lookahead(), clock=clock)
    drive = Drive(LookupDrafters(model, {"ngram": NgramProposer(2, 4)}, clock))
    drive.open(KEY, PROMPT)
    drive.work_off()
    drive.commit(KEY, Commit(KEY[1], len(PROMPT), [drawn_token(PROMPT)], 4, 4))
    drive.work_off()
    assert drive.prefetched == []


def test_the_loop_sends_them_counts_them_and_answers_no_commit_that_has_them():
    loop = DraftLoop(DraftModelProposer(MemoryEngine(), 16, lookahead()))
    sink = Sink()
    loop.attach(1, sink)
    loop.deliver(1, [prompt_of(KEY, PROMPT)])
    work_off(loop)
    loop.deliver(1, [Commit(KEY[1], 3, [drawn_token(PROMPT)], 4, 4)])
    work_off(loop)
    sent = [message for _ in range(sink.answers.qsize()) for message in sink.next()]
    (answer,) = [each for each in sent if isinstance(each, Proposals) and each.token_ids]
    main = next(each for each in sent if isinstance(each, PrefetchedProposal) and each.origin is DraftOrigin.MAIN_LINE)
    assert main.step_us > 0
    assert (loop.rounds, loop.drafted) == (1, 4)
    loop.deliver(1, [Commit(KEY[1], 4, [*answer.token_ids, main.next_token], 4, 4, True)])
    assert sink.answers.empty(), "nobody waits"
    assert (loop.rounds, loop.drafted) == (2, 8)


def work_off(loop):
    """What the loop's own thread would do, until it has nothing to do."""
    loop._wait_for_news = loop.stop
    loop.run()
    loop._stopped = False
