"""Suffix decoding as a proposer, and what it remembers of other requests."""

import pytest

from outrider.actors.drafter.suffix import AnswerMemory, SuffixProposer
from outrider.actors.drafter.suffix_index import SuffixLimits
from outrider.cluster.link.messages import Commit, DraftOrigin, DraftSampling, ProposalStatus
from outrider.cluster.modes import Mode
from tests.unit.drafter.drive import Drive, Told

KEY, OTHER = (1, 1), (2, 7)
GREEDY = DraftSampling()
LIMITS = SuffixLimits(24, 1.0, 0.1)


def proposer(max_requests=10):
    return Drive(SuffixProposer(LIMITS, max_requests, 4096))


def commit(key, base, tokens, k=4):
    return Commit(key[1], base, tokens, k, k)


def answer_all(drafter, key, prompt, answer, sampling=GREEDY):
    """A request from open to close."""
    drafter.open(key, list(prompt), 4, sampling)
    drafter.commit(key, commit(key, len(prompt), list(answer), 0))
    drafter.close(key)
    drafter.work_off()


def test_a_commit_is_answered_at_once_from_the_requests_own_text():
    drafter = proposer()
    assert drafter.open(KEY, [1, 2, 3, 4, 1, 2], 4, GREEDY) == Told(KEY, 6, [], ProposalStatus.READY)
    drafted = drafter.commit(KEY, commit(KEY, 6, [3]))
    assert drafted == [Told(KEY, 7, [4, 1, 2], ProposalStatus.OK, origin=DraftOrigin.MAIN_LINE)]
    assert drafter.commit(KEY, commit(KEY, 7, [4], 0)) == []
    assert drafter.commit(KEY, commit(KEY, 8, [9]))[0].token_ids == []


def test_a_finished_answer_helps_the_next_request():
    drafter = proposer()
    answer_all(drafter, KEY, [1, 2, 3], range(50, 80))
    drafter.open(OTHER, [7, 8], 4, GREEDY)
    assert drafter.commit(OTHER, commit(OTHER, 2, [60, 61, 62]))[0].token_ids == [63, 64, 65]


def test_a_tenants_answers_help_its_own_requests_and_nobody_elses():
    drafter = proposer()
    mine, theirs = DraftSampling(tenant=7), DraftSampling(tenant=2**62)
    for number, (sampling, first) in enumerate(((mine, 50), (theirs, 80), (GREEDY, 110)), 1):
        answer_all(drafter, (1, number), [1, 2, 3], range(first, first + 30), sampling)
    asked = 10
    for asking in (mine, theirs, GREEDY, DraftSampling(tenant=8)):
        for answered, first in ((mine, 60), (theirs, 90), (GREEDY, 120)):
            asked += 1
            key = (2, asked)
            drafter.open(key, [7, 8], 4, asking)
            (told,) = drafter.commit(key, commit(key, 2, [first, first + 1, first + 2]))
            assert told.token_ids == ([first + 3, first + 4, first + 5] if asking == answered else [])


def test_a_draft_ends_where_another_tenants_answer_begins():
    answers = AnswerMemory(10, 4096, LIMITS)
    for tenant in (5, 6, 0, 5):
        answers.add(range(20, 40), tenant=tenant)
    for tenant in (5, 6, 0):
        found = answers.path(list(range(20, 38)), 8, tenant=tenant)
        assert found.token_ids == [38, 39]
        assert found.score <= 2


def test_of_a_prompt_the_end_alone_is_remembered_before_the_answer():
    drafter = proposer()
    answer_all(drafter, KEY, range(200, 300), range(50, 60))
    drafter.open(OTHER, [297, 298], 4, GREEDY)
    assert drafter.commit(OTHER, commit(OTHER, 2, [299]))[0].token_ids == [50, 51, 52]
    drafter.open((2, 8), [210, 211], 4, GREEDY)
    assert drafter.commit((2, 8), commit((2, 8), 2, [212]))[0].token_ids == []
    assert drafter.counters()["suffix_cached_requests"] == 1


@pytest.mark.parametrize(
    ("first", "second", "learns"),
    [
        (DraftSampling(Mode.REJECTION, 1.0, seed=5), DraftSampling(Mode.REJECTION, 1.0, seed=5), False),
        (DraftSampling(Mode.BLOCK, 1.0, seed=5), DraftSampling(Mode.REJECTION, 1.0, seed=5), False),
        (DraftSampling(Mode.REJECTION, 1.0, seed=5), DraftSampling(Mode.REJECTION, 1.0, seed=6), True),
        (DraftSampling(Mode.COUPLED, 1.0, seed=5), DraftSampling(Mode.COUPLED, 1.0, seed=5), True),
        (DraftSampling(Mode.COUPLED, 1.0, seed=5), DraftSampling(Mode.REJECTION, 1.0, seed=5), True),
        (GREEDY, DraftSampling(Mode.REJECTION, 1.0, seed=0), True),
    ],
)
def test_a_request_learns_nothing_from_one_that_drew_the_same_random_numbers(first, second, learns):
    drafter = proposer()
    answer_all(drafter, KEY, [1, 2, 3], range(50, 80), first)
    drafter.open(OTHER, [7, 8], 4, second)
    drafted = drafter.commit(OTHER, commit(OTHER, 2, [60, 61, 62]))[0].token_ids
    assert drafted == ([63, 64, 65] if learns else [])


def test_of_the_commits_of_an_unread_prompt_the_last_is_answered_once_if_it_wants_drafts():
    drafter = proposer()
    prompt = [*range(10_000), 5, 6]
    for key, last_wants in ((KEY, 3), (OTHER, 0)):
        drafter.open(key, list(prompt), 4, GREEDY)
        drafter.commit(key, commit(key, len(prompt), [7], 1))
        drafter.commit(key, commit(key, len(prompt) + 1, [8, 9], last_wants))
    answers = drafter.work_off()
    assert [(answer.key, answer.status) for answer in answers] == [
        (KEY, ProposalStatus.READY), (KEY, ProposalStatus.OK), (OTHER, ProposalStatus.READY)
    ]  # fmt: skip
    assert answers[1].base_committed_len == len(prompt) + 3
    assert len(answers[1].token_ids) == 3


def test_without_a_cache_each_request_has_its_own_text_only():
    drafter = proposer(max_requests=0)
    answer_all(drafter, KEY, [1, 2, 3], range(50, 80))
    drafter.open(OTHER, [7, 8], 4, GREEDY)
    assert drafter.commit(OTHER, commit(OTHER, 2, [60, 61, 62]))[0].token_ids == []


def test_the_oldest_requests_are_forgotten_first():
    answers = AnswerMemory(max_requests=2, max_tokens=4096, limits=LIMITS)
    for number in range(3):
        answers.add(range(100 * number, 100 * number + 40))
    assert answers.num_requests == 2
    found = [answers.path([start, start + 1], 2).token_ids for start in (5, 105, 205)]
    assert found == [[], [107, 108], [207, 208]]


def test_tokens_are_bounded_whatever_the_number_of_requests():
    answers = AnswerMemory(max_requests=10_000, max_tokens=1024, limits=LIMITS)
    for number in range(500):
        answers.add(range(number, number + 50), seed=number)
        assert answers.num_tokens <= 1024
    assert answers.num_requests < 30
    for seed, known in ((1, True), (499, False)):  # the request with seed 1 is forgotten, and its seed with it
        assert answers.path([510, 511], 2, seed).token_ids == ([512, 513] if known else [])
