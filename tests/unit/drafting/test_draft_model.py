"""The draft model's policy over an engine in memory: what it proposes is always the model's own continuation."""

import itertools
import random

import pytest

from actors.drafting.draft_model import DraftModelStrategy
from actors.drafting.draft_vocabulary import DraftVocabulary
from actors.drafting.loop import DraftLoop
from actors.drafting.step_planner import LookaheadLimits
from actors.drafting.strategy import UnknownSequence
from actors.length.origin import Origin
from actors.messages import Close, CloseReason, Commit, DraftSampling, Open, ProposalStatus
from actors.verification.mode import Mode
from tests.unit.drafting_engine import VOCAB, MemoryEngine, continuation, drawn_token

GREEDY = DraftSampling()
SAMPLED = DraftSampling(Mode.REJECTION, temperature=0.8, seed=5, top_n=3)
KEY, OTHER = (1, 1), (2, 1)


class Nowhere:
    def send(self, proposals, work_us): ...


class Bench:
    """A strategy, its engine, and one way to make commits."""

    def __init__(self, limits=None, chunk=16, **engine):
        self.engine = MemoryEngine(**engine)
        self.strategy = DraftModelStrategy(self.engine, chunk, limits, clock=itertools.count().__next__)
        self.texts = {}

    def open(self, key, tokens, sampling=GREEDY, k=4):
        self.texts[key] = list(tokens)
        return self.strategy.open(key, list(tokens), k, sampling)

    def commit(self, key, tokens, k=4, on_miss=None):
        commit = Commit(key[1], len(self.texts[key]), tokens, k, k if on_miss is None else on_miss)
        self.texts[key] += tokens
        return self.strategy.commit(key, commit)

    def answer(self, key, tokens, k=4, on_miss=None):
        """The one answer that is at hand; None if there is none."""
        answers = self.commit(key, tokens, k, on_miss)
        assert len(answers) < 2
        return answers[0] if answers else None

    def step(self):
        """One unit of work. Returns its answers; None when there is nothing to do."""
        work, answers = self.strategy.plan()
        if work is None:
            return answers or None
        work.execute()
        return answers + self.strategy.complete(work)

    def settle(self):
        """Work until nothing is left to draft ahead. Returns all answers."""
        answers = []
        while (more := self.step()) is not None:
            answers += more
        return answers

    def drafts(self, key, count=4, samples_q=False):
        return continuation(self.texts[key], count, samples_q)


def ids(draft):
    assert draft.status is ProposalStatus.OK
    return draft.token_ids


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
@pytest.mark.parametrize("prompt_len", [3, 4, 40, 100])
def test_a_miss_is_drafted_at_once(sampling, prompt_len):
    bench = Bench()
    bench.open(KEY, range(prompt_len), sampling)
    bench.settle()
    assert bench.commit(KEY, [999]) == []
    (answer,) = bench.settle()
    assert ids(answer) == bench.drafts(KEY, samples_q=sampling is SAMPLED)
    assert answer.base_committed_len == prompt_len + 1
    assert answer.origin is Origin.MISS


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_a_main_line_hit_is_answered_without_a_step(sampling):
    bench = Bench()
    bench.open(KEY, range(10), sampling)
    bench.settle()
    bench.commit(KEY, [999])
    (answer,) = bench.settle()
    for _ in range(5):
        text = bench.texts[KEY] + ids(answer)
        bonus = drawn_token(text)
        answer = bench.answer(KEY, [*ids(answer), bonus])
        assert answer.origin is Origin.MAIN_LINE
        assert ids(answer) == bench.drafts(KEY, samples_q=sampling is SAMPLED)
        bench.settle()


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
@pytest.mark.parametrize("accepted", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("rank", [1, 2])
def test_a_side_branch_hit_is_answered_without_a_step_and_goes_on_as_the_main_line(sampling, accepted, rank):
    samples_q = sampling is SAMPLED
    bench = Bench(LookaheadLimits(max_side_branches=20))
    bench.open(KEY, range(10), sampling)
    bench.settle()
    bench.commit(KEY, [999])
    (answer,) = bench.settle()
    for _ in range(6):
        start = 0 if not samples_q or accepted == 4 else len(bench.texts[KEY])
        text = bench.texts[KEY] + ids(answer)[:accepted]
        answer = bench.answer(KEY, [*ids(answer)[:accepted], drawn_token(text, start, rank)])
        assert answer is not None, "not foreseen"
        assert answer.origin is Origin.SIDE_BRANCH
        assert ids(answer) == bench.drafts(KEY, samples_q=samples_q)
        bench.settle()


def test_the_outcomes_that_are_likeliest_get_the_branches():
    bench = Bench(LookaheadLimits(max_side_branches=3))
    bench.open(KEY, range(10))
    bench.settle()
    bench.commit(KEY, [999])
    bench.settle()
    sides = bench.strategy._residents[KEY].sequence.sides
    # A position further on is reached with 0.7 of the probability, a second alternative has half of the first's.
    assert [position for position, _ in sides] == [11, 12, 11]
    assert bench.strategy.usage()["num_side_branches"] == 3


def test_without_lookahead_nothing_runs_between_commits():
    bench = Bench(LookaheadLimits(ahead=False))
    bench.open(KEY, range(10))
    bench.settle()
    bench.commit(KEY, [999])
    (answer,) = bench.settle()
    assert ids(answer) == bench.drafts(KEY)
    assert len(bench.engine.plans) == 4, "four drafts, the prompt in the first"
    assert bench.commit(KEY, [*ids(answer), drawn_token(bench.texts[KEY] + ids(answer))]) == []
    assert bench.settle()[0].origin is Origin.MISS


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_drafts_that_were_not_verified_serve_another_round_only_if_they_belong_to_none(sampling):
    """The verifier used two of four drafts and chose the third itself: the fourth was drawn for a round now over."""
    bench = Bench()
    bench.open(KEY, range(10), sampling)
    bench.settle()
    bench.commit(KEY, [999])
    (answer,) = bench.settle()
    first = bench.answer(KEY, ids(answer)[:3])
    assert (first is not None) == (sampling is GREEDY)
    answers = [first] if first is not None else bench.settle()
    assert ids(answers[0]) == bench.drafts(KEY, samples_q=sampling is SAMPLED)


def test_a_partial_hit_is_answered_with_what_is_there():
    bench = Bench()
    bench.open(KEY, range(10))
    bench.settle()
    bench.commit(KEY, [999])
    while not (answers := bench.step()):
        pass
    bench.step(), bench.step(), bench.step()  # the guess of the bonus token, and two drafts after it
    text = bench.texts[KEY] + ids(answers[0])
    answer = bench.answer(KEY, [*ids(answers[0]), drawn_token(text)], on_miss=1)
    assert ids(answer) == bench.drafts(KEY, 2)


def test_a_miss_that_is_not_worth_waiting_for_is_answered_empty():
    bench = Bench()
    bench.open(KEY, range(10))
    bench.settle()
    answer = bench.answer(KEY, [999], on_miss=0)
    assert (ids(answer), answer.origin) == ([], Origin.MISS)
    bench.settle()
    # What is drafted ahead then starts with a guess of the very next token.
    answer = bench.answer(KEY, [drawn_token(bench.texts[KEY])])
    assert ids(answer) == bench.drafts(KEY)


def test_no_drafts_wanted_is_no_answer_and_no_draft():
    bench = Bench(chunk=16)
    bench.open(KEY, range(10))
    bench.settle()
    before = len(bench.engine.plans)
    for token in range(100):
        assert bench.commit(KEY, [token], k=0) == []
        assert bench.settle() == []
    assert not any(row.draws for plan in bench.engine.plans[before:] for row in plan.rows)
    assert bench.strategy.usage()["num_side_branches"] == 0
    # It has kept up as a prompt does, so the first commit that wants drafts gets some.
    assert bench.commit(KEY, [7]) == []
    (answer,) = bench.settle()
    assert ids(answer) == bench.drafts(KEY)


def test_what_is_wanted_is_prefilled_before_what_is_not():
    bench = Bench(chunk=16)
    bench.open(KEY, range(10))
    bench.settle()
    for token in range(50):
        bench.commit(KEY, [token], k=0)
    bench.open(OTHER, range(100))
    assert [len(answers) for _ in range(5) if (answers := bench.step())] == [1], "READY within the fifth chunk"


def test_a_commit_that_is_overtaken_is_answered_empty():
    bench = Bench()
    bench.open(KEY, range(10))
    bench.settle()
    assert bench.commit(KEY, [999]) == []
    (late,) = bench.commit(KEY, [998])
    assert (late.base_committed_len, late.token_ids, late.status) == (11, [], ProposalStatus.OK)
    (answer,) = bench.settle()
    assert ids(answer) == bench.drafts(KEY)


def test_with_more_sequences_than_rows_everybody_is_answered():
    bench = Bench(LookaheadLimits(ahead=False, max_rows=4))
    keys = [(1, index) for index in range(12)]
    for key in keys:
        bench.open(key, [key[1]] * 5)
    bench.settle()
    answered = dict.fromkeys(keys, 0)
    for _ in range(20):
        for key in keys:
            bench.commit(key, [3], k=2)
        for _ in range(2):  # of the six steps that all of them would take
            for answer in bench.step() or []:
                answered[answer.key] += len(answer.token_ids) > 0
    assert min(answered.values()) > 0


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_guesses_give_the_same_drafts_in_fewer_steps_where_drafts_are_a_function_of_the_text(sampling):
    bench = Bench(LookaheadLimits(ahead=False, prompt_lookup_min=2, prompt_lookup_max=3))
    prompt = [1, 2, *continuation([1, 2], 8)]
    bench.open(KEY, [*prompt, 50, 1], sampling)
    bench.settle()
    before = len(bench.engine.plans)
    bench.commit(KEY, [2])
    (answer,) = bench.settle()
    guessed = [row.guesses for plan in bench.engine.plans[before:] for row in plan.rows if row.guesses]
    assert bool(guessed) == (sampling is GREEDY)
    assert ids(answer) == bench.drafts(KEY, samples_q=sampling is SAMPLED)


def test_long_prompts_are_prefilled_in_chunks_and_announced():
    bench = Bench(chunk=16)
    assert bench.open(KEY, range(100)) is None
    ready = [a for a in bench.settle() if a.status is ProposalStatus.READY]
    assert [a.key for a in ready] == [KEY]
    assert max(len(row.token_ids) for plan in bench.engine.plans for row in plan.rows) <= 32
    assert bench.open(OTHER, range(5)).status is ProposalStatus.READY


def test_a_prompt_in_the_prefix_cache_needs_no_prefill():
    bench = Bench(chunk=16)
    bench.engine.cached = 96
    assert bench.open(KEY, range(100)).status is ProposalStatus.READY
    bench.commit(KEY, [5])
    assert ids(bench.settle()[0]) == bench.drafts(KEY)


def test_prompts_get_their_share_while_sequences_wait():
    bench = Bench(LookaheadLimits(ahead=False), chunk=16)
    bench.open(KEY, range(10))
    bench.settle()
    bench.open(OTHER, range(200))
    steps = 0
    while bench.strategy.usage()["num_prefilling"]:
        bench.commit(KEY, [1], k=1)
        bench.step()
        steps += 1
        assert steps < 200
    assert steps > 12, "commits come first"


def test_out_of_kv_is_answered_and_room_brings_drafts_back():
    bench = Bench(num_blocks=8)  # 32 tokens
    bench.open(KEY, range(20))
    bench.settle()
    bench.open(OTHER, range(100, 106))
    bench.settle()
    bench.commit(OTHER, [7], k=8)
    answers = bench.settle()
    assert answers
    bench.strategy.close(KEY)
    bench.commit(OTHER, [8], k=8)
    assert ids(bench.settle()[0]) == bench.drafts(OTHER, 8)


def test_side_branches_yield_to_texts():
    bench = Bench(LookaheadLimits(max_side_branches=20), num_blocks=14)
    bench.open(KEY, range(10))
    bench.settle()
    bench.commit(KEY, [999])
    bench.settle()
    assert bench.strategy.usage()["num_side_branches"] > 0
    bench.open(OTHER, range(100, 120))
    bench.settle()
    bench.commit(OTHER, [3])
    assert ids(bench.settle()[0]) == bench.drafts(OTHER)


def test_drafts_end_at_the_longest_text_the_model_takes():
    bench = Bench(max_model_len=16)
    bench.open(KEY, range(10))
    bench.settle()
    bench.commit(KEY, [1, 2, 3])
    assert ids(bench.settle()[0]) == bench.drafts(KEY, 3)
    bench.commit(KEY, [1, 2])
    assert ids(bench.settle()[0]) == bench.drafts(KEY, 1)
    assert bench.answer(KEY, [1]).status is ProposalStatus.LENGTH
    assert bench.answer(KEY, [1]).status is ProposalStatus.LENGTH
    assert bench.open(OTHER, range(16)) is None
    assert bench.strategy.commit(OTHER, Commit(1, 16, [1], 4, 4))[0].status is ProposalStatus.LENGTH


def test_bad_logits_end_the_drafts_and_nothing_else():
    bench = Bench()
    bench.open(KEY, range(10))
    bench.settle()
    bench.engine.bad_after = 13
    bench.commit(KEY, [1])
    assert ids(bench.settle()[0]) == bench.drafts(KEY, 2)
    bench.engine.bad_after = None
    bench.commit(KEY, [1])
    assert ids(bench.settle()[0]) == bench.drafts(KEY)


def test_unknown_sequences_and_lengths_are_named():
    bench = Bench()
    with pytest.raises(UnknownSequence):
        bench.strategy.commit(KEY, Commit(1, 5, [1], 4, 4))
    bench.open(KEY, range(10))
    with pytest.raises(UnknownSequence):
        bench.strategy.commit(KEY, Commit(1, 5, [1], 4, 4))


def test_the_memory_of_lookahead_is_bounded_and_comes_back():
    bench = Bench(LookaheadLimits(max_side_branches=5))
    for index in range(20):
        bench.open((1, index), range(index, index + 30))
    bench.settle()
    for index in range(20):
        bench.commit((1, index), [index])
        bench.settle()
    usage = bench.strategy.usage()
    assert 20 < usage["num_side_branches"] <= 20 * 5
    assert usage["branch_blocks"] <= 20 * 5 * 3
    for index in range(20):
        bench.strategy.close((1, index))
    bench.settle()
    assert bench.strategy.usage() == {
        "num_sequences": 0,
        "num_prefilling": 0,
        "num_side_branches": 0,
        "branch_blocks": 0,
        "kv_cache_usage": 0.0,
    }


def test_a_thousand_requests_leave_nothing_behind():
    vocabulary = DraftVocabulary(VOCAB, 200)
    engine = MemoryEngine()
    limits = LookaheadLimits(prompt_lookup_min=1, prompt_lookup_max=2)
    strategy = DraftModelStrategy(engine, 64, limits, vocabulary, itertools.count().__next__)
    loop = DraftLoop(strategy)
    loop.attach(1, Nowhere())
    for request in range(1000):
        loop.deliver(1, [Open(request, 3, 0, [request % 50, 2, 3], 2, GREEDY), Commit(request, 3, [5], 2, 2)])
        for _ in range(3):
            work, _ = strategy.plan()
            work.execute()
            strategy.complete(work)
        loop.deliver(1, [Close(request, CloseReason.FINISHED)])
    assert strategy.plan() == (None, [])
    usage = loop.usage()
    assert (usage["num_sequences"], usage["branch_blocks"], usage["kv_cache_usage"]) == (0, 0, 0)
    assert not engine.committed
    assert not engine.taken
    left = [loop._asked, loop._opening, loop._keys[1], vocabulary._pinned_by, vocabulary._pins, strategy._closed]
    assert not any(left)


@pytest.mark.parametrize("seed", range(30))
def test_any_order_of_commits_and_steps_gives_the_models_own_drafts(seed):
    """Commits that arrive while a step runs, verifiers that use fewer drafts than they got or go on without, requests
    that come and go, and a KV cache that is sometimes too small."""
    rng = random.Random(seed)
    limits = LookaheadLimits(max_side_branches=rng.choice([0, 2, 8]), max_rows=rng.choice([3, 8, 64]))
    bench = Bench(limits, chunk=rng.choice([8, 64]), num_blocks=rng.choice([40, 2000]), max_model_len=120)
    sampling, proposed, waiting = {}, {}, set()
    origins = []

    def take(answer):
        if answer is None or answer.key not in bench.texts:
            return
        text = bench.texts[answer.key]
        if answer.status is ProposalStatus.OK and answer.base_committed_len == len(text):
            samples_q = sampling[answer.key] is SAMPLED
            assert answer.token_ids == continuation(text, len(answer.token_ids), samples_q)
            proposed[answer.key] = answer.token_ids
            origins.append(answer.origin)
        if answer.status is not ProposalStatus.READY and answer.status is not ProposalStatus.NOT_READY:
            waiting.discard(answer.key)

    def commit_somewhere():
        keys = [key for key in bench.texts if key not in waiting or rng.random() < 0.2]
        if not keys:
            return
        key = rng.choice(keys)
        drafts, text = proposed.pop(key, []), bench.texts[key]
        drafts = drafts[: rng.randint(0, len(drafts))] if rng.random() < 0.2 else drafts
        accepted = rng.choice([len(drafts), len(drafts), rng.randint(0, len(drafts))])
        start = len(text) if sampling[key] is SAMPLED and accepted < len(drafts) else 0
        rank = rng.choice([0, 1, 1, 2, 7]) if accepted == len(drafts) else rng.choice([1, 1, 2, 7])
        token = drawn_token(text + drafts[:accepted], start, rank)
        k = rng.choice([0, 2, 4, 4, 4])
        waiting.discard(key) if k == 0 else waiting.add(key)
        for answer in bench.commit(key, [*drafts[:accepted], token], k, rng.randint(0, k)):
            take(answer)

    for request in range(300):
        if rng.random() < 0.05 or not bench.texts:
            key = (rng.randint(1, 2), request)
            sampling[key] = rng.choice([GREEDY, SAMPLED])
            bench.open(key, [rng.randrange(1000) for _ in range(rng.randint(1, 60))], sampling[key])
        if rng.random() < 0.02:
            key = rng.choice(list(bench.texts))
            bench.strategy.close(key)
            del bench.texts[key]
            proposed.pop(key, None), waiting.discard(key)
        work, answers = bench.strategy.plan()
        for answer in answers:
            take(answer)
        if rng.random() < 0.7:
            commit_somewhere()
        if work is not None:
            work.execute()
            for answer in bench.strategy.complete(work):
                take(answer)
    assert origins
    for key in list(bench.texts):
        bench.strategy.close(key)
    bench.settle()
    assert bench.strategy.usage()["kv_cache_usage"] == 0
    assert len(set(bench.engine.free)) == bench.engine.num_blocks
