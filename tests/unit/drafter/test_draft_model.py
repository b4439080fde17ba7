"""The draft model's policy over an engine in memory: what it proposes is always the model's own continuation."""

import random
from dataclasses import replace

import pytest

from outrider.cluster.link.messages import DraftOrigin, ProposalStatus
from tests.unit.drafter.draft_bench import GREEDY, KEY, OTHER, SAMPLED, Bench, ids
from tests.unit.drafting_engine import drawn_token, lookahead


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
@pytest.mark.parametrize("prompt_len", [3, 4, 40, 100])
def test_a_miss_is_drafted_at_once(sampling, prompt_len):
    bench = Bench().opened(range(prompt_len), sampling)
    assert bench.commit(KEY, [999]) == []
    (answer,) = bench.settle()
    assert ids(answer) == bench.drafts(KEY, samples_q=sampling is SAMPLED)
    assert answer.base_committed_len == prompt_len + 1
    assert answer.origin is DraftOrigin.MISS


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_a_main_line_hit_is_answered_without_a_step(sampling):
    bench = Bench().opened(sampling=sampling)
    bench.commit(KEY, [999])
    (answer,) = bench.settle()
    for _ in range(5):
        text = bench.texts[KEY] + ids(answer)
        bonus = drawn_token(text)
        answer = bench.answer(KEY, [*ids(answer), bonus])
        assert answer.origin is DraftOrigin.MAIN_LINE
        assert ids(answer) == bench.drafts(KEY, samples_q=sampling is SAMPLED)
        bench.settle()


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
@pytest.mark.parametrize("accepted", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("rank", [1, 2])
def test_a_side_branch_hit_is_answered_without_a_step_and_goes_on_as_the_main_line(sampling, accepted, rank):
    samples_q = sampling is SAMPLED
    bench = Bench(lookahead(max_side_branches=20)).opened(sampling=sampling)
    bench.commit(KEY, [999])
    (answer,) = bench.settle()
    for _ in range(6):
        start = 0 if not samples_q or accepted == 4 else len(bench.texts[KEY])
        text = bench.texts[KEY] + ids(answer)[:accepted]
        answer = bench.answer(KEY, [*ids(answer)[:accepted], drawn_token(text, start, rank)])
        assert answer is not None, "not foreseen"
        assert answer.origin is DraftOrigin.SIDE_BRANCH
        assert ids(answer) == bench.drafts(KEY, samples_q=samples_q)
        bench.settle()


def test_the_outcomes_that_are_likeliest_get_the_branches():
    bench = Bench(lookahead(max_side_branches=3)).opened()
    bench.commit(KEY, [999])
    bench.settle()
    sides = bench.proposer.sequences[KEY].sides
    # A position further on is reached with 0.7 of the probability, a second alternative has half of the first's.
    assert [position for position, _ in sides] == [11, 12, 11]
    assert bench.proposer.usage()["num_side_branches"] == 3


def test_without_lookahead_nothing_runs_between_commits():
    bench = Bench(lookahead(ahead=False)).opened()
    bench.commit(KEY, [999])
    (answer,) = bench.settle()
    assert ids(answer) == bench.drafts(KEY)
    assert len(bench.engine.plans) == 4, "four drafts, the prompt in the first"
    assert bench.commit(KEY, [*ids(answer), drawn_token(bench.texts[KEY] + ids(answer))]) == []
    assert bench.settle()[0].origin is DraftOrigin.MISS


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_drafts_that_were_not_verified_serve_another_round_only_if_they_belong_to_none(sampling):
    """The verifier used two of four drafts and chose the third itself: the fourth was drawn for a round now over."""
    bench = Bench().opened(sampling=sampling)
    bench.commit(KEY, [999])
    (answer,) = bench.settle()
    first = bench.answer(KEY, ids(answer)[:3])
    assert (first is not None) == (sampling is GREEDY)
    answers = [first] if first is not None else bench.settle()
    assert ids(answers[0]) == bench.drafts(KEY, samples_q=sampling is SAMPLED)


def test_a_partial_hit_is_answered_with_what_is_there():
    bench = Bench().opened()
    bench.commit(KEY, [999])
    while not (answers := bench.step()):
        pass
    bench.step(), bench.step(), bench.step()  # the guess of the bonus token, and two drafts after it
    text = bench.texts[KEY] + ids(answers[0])
    answer = bench.answer(KEY, [*ids(answers[0]), drawn_token(text)], on_miss=1)
    assert ids(answer) == bench.drafts(KEY, 2)


def test_a_miss_that_is_not_worth_waiting_for_is_answered_empty():
    bench = Bench().opened()
    answer = bench.answer(KEY, [999], on_miss=0)
    assert (ids(answer), answer.origin) == ([], DraftOrigin.MISS)
    bench.settle()
    # What is drafted ahead then starts with a guess of the very next token.
    answer = bench.answer(KEY, [drawn_token(bench.texts[KEY])])
    assert ids(answer) == bench.drafts(KEY)


def test_no_drafts_wanted_is_no_answer_and_no_draft():
    bench = Bench(chunk=16).opened()
    before = len(bench.engine.plans)
    for token in range(100):
        assert bench.commit(KEY, [token], k=0) == []
        assert bench.settle() == []
    assert not any(row.draws for plan in bench.engine.plans[before:] for row in plan.rows)
    assert bench.proposer.usage()["num_side_branches"] == 0
    # It has kept up as a prompt does, so the first commit that wants drafts gets some.
    assert bench.commit(KEY, [7]) == []
    (answer,) = bench.settle()
    assert ids(answer) == bench.drafts(KEY)


def test_what_is_wanted_is_prefilled_before_what_is_not():
    bench = Bench(chunk=16).opened()
    for token in range(50):
        bench.commit(KEY, [token], k=0)
    bench.open(OTHER, range(100))
    assert [len(answers) for _ in range(5) if (answers := bench.step())] == [1], "READY within the fifth chunk"


def test_a_commit_that_is_overtaken_is_answered_empty():
    bench = Bench().opened()
    assert bench.commit(KEY, [999]) == []
    (late,) = bench.commit(KEY, [998])
    assert (late.base_committed_len, late.token_ids, late.status) == (11, [], ProposalStatus.OK)
    (answer,) = bench.settle()
    assert ids(answer) == bench.drafts(KEY)


@pytest.mark.parametrize("one_pass", [False, True], ids=["token by token", "one pass"])
@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(n, marks=pytest.mark.exhaustive) for n in range(8, 30))])
def test_any_order_of_commits_and_steps_gives_the_models_own_drafts(seed, one_pass):
    """Commits that arrive while a step runs, verifiers that use fewer drafts than they got or go on without, requests
    that come and go, and a KV cache that is sometimes too small."""
    rng = random.Random(seed)
    limits = lookahead(max_side_branches=rng.choice([0, 2, 8]), max_rows=rng.choice([3, 8, 64]))
    memory = {"num_blocks": rng.choice([40, 2000]), "max_model_len": 120}
    bench = Bench(limits, chunk=rng.choice([8, 64]), one_pass=one_pass, **memory)
    sampling, proposed, waiting = {}, {}, set()
    origins = []

    def take(answer):
        if answer is None or answer.key not in bench.texts:
            return
        text = bench.texts[answer.key]
        if answer.status is ProposalStatus.OK and answer.base_committed_len == len(text):
            samples_q = sampling[answer.key] is SAMPLED
            assert answer.token_ids == bench.drafts(answer.key, len(answer.token_ids), samples_q)
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
        token = bench.choice(key, accepted, rank, start)
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
            bench.proposer.close(key)
            del bench.texts[key]
            proposed.pop(key, None), waiting.discard(key)
        work, answers = bench.proposer.plan()
        for answer in answers:
            take(answer)
        if rng.random() < 0.7:
            commit_somewhere()
        if work is not None:
            work.execute()
            for answer in bench.proposer.complete(work):
                take(answer)
    assert origins
    for key in list(bench.texts):
        bench.proposer.close(key)
    bench.settle()
    assert bench.proposer.usage()["kv_cache_usage"] == 0
    assert len(set(bench.engine.free)) == bench.engine.num_blocks


@pytest.mark.parametrize("prompt_len", [100, 3000], ids=["at once", "between steps"])
def test_every_row_is_of_the_request_s_adapter_and_blocks_are_cached_for_it_and_its_tenant(prompt_len):
    bench = Bench(lookahead(max_side_branches=2), max_model_len=4096, num_blocks=2000)
    asked = {(1, 1): replace(GREEDY, adapter=2, tenant=7), (1, 2): GREEDY}
    for key, sampling in asked.items():
        bench.open(key, range(prompt_len), sampling)
        bench.settle()
        bench.commit(key, [5])
        bench.settle()
    assert sorted(bench.engine.cached_for) == [(0, 0), (7, 2)]
    fed = {}
    for plan in bench.engine.plans:
        for row in plan.rows:
            fed.setdefault(row.adapter, []).append(bool(row.draws))
    assert set(fed) == {0, 2}
    assert all(set(draws) == {False, True} for draws in fed.values()), "prompts and drafts alike"
