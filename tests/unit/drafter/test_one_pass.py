"""A draft model that drafts in one pass: a step for each round, whose rows are all likely outcomes, and masks of which
nothing is kept."""

import pytest

from outrider.cluster.config import ConfigError
from outrider.cluster.link.messages import DraftOrigin, DraftSampling
from outrider.cluster.modes import Mode
from outrider.cluster.vocabulary import MASK_TOKENS, mask_token
from tests.unit.drafter.draft_bench import GREEDY, KEY, SAMPLED, Bench, ids
from tests.unit.drafting_engine import lookahead

K = 4
COUPLED = DraftSampling(Mode.COUPLED, temperature=0.8, seed=5, top_n=0)
SAMPLINGS = {"greedy": GREEDY, "coupled": COUPLED, "rejection": SAMPLED}


@pytest.fixture(params=SAMPLINGS)
def sampling(request):
    return SAMPLINGS[request.param]


def first_round(sampling, **options):
    """A bench whose first round is proposed, with nothing drafted ahead yet, and the answer."""
    bench = Bench(lookahead(max_side_branches=20), one_pass=True, **options).opened(sampling=sampling)
    bench.engine.plans.clear()
    assert bench.commit(KEY, [999]) == []
    return bench, bench.step()[0]


def test_a_round_is_drafted_in_one_step_after_the_text_and_masks(sampling):
    bench, answer = first_round(sampling)
    ((row,),) = [plan.rows for plan in bench.engine.plans]
    assert list(row.token_ids) == [999]
    assert [draw.position for draw in row.draws] == [11 + index for index in range(K + 1)], "and a guess of the bonus"
    assert ids(answer) == bench.drafts(KEY, K, sampling is SAMPLED)


@pytest.mark.parametrize(("accepted", "rank"), [(0, 1), (1, 2), (3, 1), (K, 0), (K, 1)])
def test_one_step_drafts_for_all_likely_outcomes_each_answered_without_another(sampling, accepted, rank):
    bench, answer = first_round(sampling)
    for _ in range(6):
        bench.engine.plans.clear()
        bench.settle()
        (plan,) = bench.engine.plans
        assert K < len(plan.rows) <= 1 + 2 * (K + 1), "all accepted, and the likeliest other tokens at each position"
        start = len(bench.texts[KEY]) if sampling is SAMPLED else 0
        token = bench.choice(KEY, accepted, rank, start)
        answer = bench.answer(KEY, [*ids(answer)[:accepted], token])
        hit = DraftOrigin.MAIN_LINE if (accepted, rank) == (K, 0) else DraftOrigin.SIDE_BRANCH
        assert answer.origin is hit
        assert ids(answer) == bench.drafts(KEY, K, sampling is SAMPLED)


@pytest.mark.parametrize("accepted", range(K + 1))
def test_what_stood_under_a_mask_is_fed_again_and_what_was_accepted_is_not(accepted):
    """The step ahead has fed the drafts as tokens."""
    bench, answer = first_round(GREEDY)
    base = len(bench.texts[KEY])
    after = [*ids(answer)[:accepted], 777]
    for is_ahead in (True, False):
        if not is_ahead:
            bench, answer = first_round(GREEDY)
        else:
            bench.settle()
        assert bench.commit(KEY, after) == []
        work, _ = bench.proposer.plan()
        (row,) = work.plan.rows
        assert (row.start, list(row.token_ids)) == (base + accepted, [777]) if is_ahead else (base, after)
        work.execute()
        assert ids(bench.proposer.complete(work)[0]) == bench.drafts(KEY)


def test_a_hit_that_wants_more_drafts_than_were_drawn_gets_what_is_there(sampling):
    bench = Bench(one_pass=True).opened(sampling=sampling)
    bench.commit(KEY, [999], k=2)
    (answer,) = bench.settle()
    answer = bench.answer(KEY, [*ids(answer), bench.choice(KEY, 2, 0, 11 if sampling is SAMPLED else 0)], k=6)
    assert ids(answer) == bench.drafts(KEY, 3, sampling is SAMPLED)


def test_with_nothing_proposed_the_next_token_is_guessed_before_the_drafts_that_follow_it(sampling):
    bench = Bench(one_pass=True).opened(sampling=sampling)
    assert ids(bench.answer(KEY, [999], on_miss=0)) == []
    bench.engine.plans.clear()
    bench.settle()
    assert [len(plan.rows) for plan in bench.engine.plans] == [1, 3]
    for rank, origin in ((0, DraftOrigin.MAIN_LINE), (1, DraftOrigin.SIDE_BRANCH)):
        answer = bench.answer(KEY, [bench.choice(KEY, 0, rank)], on_miss=0)
        assert (ids(answer), answer.origin) == (bench.drafts(KEY, K, sampling is SAMPLED), origin)
        bench.answer(KEY, [998], on_miss=0)
        bench.settle()


def test_proposals_of_all_outcomes_are_sent_ahead_where_no_q_travels():
    bench, answer = first_round(COUPLED)
    bench.settle()
    text = list(bench.texts[KEY])
    ahead = [proposal for _, proposal in bench.proposer.prefetched if proposal.base_committed_len == len(text)]
    assert len({(each.position, each.next_token) for each in ahead}) == len(ahead) == 1 + 2 * (K + 1)
    for each in ahead:
        bench.texts[KEY] = [*text, *ids(answer)[: each.position - len(text)], each.next_token]
        assert each.token_ids == bench.drafts(KEY)


def test_targets_that_reckon_with_a_step_for_each_draft_come_to_one_step_for_all():
    times = [Bench(one_pass=one_pass).opened() for one_pass in (False, True)]
    for bench in times:
        bench.commit(KEY, [999])
        bench.settle()
    token_by_token, one_pass = (bench.proposer.step_us() for bench in times)
    assert one_pass * K == pytest.approx(token_by_token, rel=0.01)


@pytest.mark.parametrize("name", MASK_TOKENS)
def test_a_mask_token_is_found_where_vllm_finds_it(name):
    from transformers import LlamaConfig
    from vllm.v1.worker.gpu.spec_decode.utils import get_parallel_drafting_token_id

    document = LlamaConfig(**{name: 7, "ptd_token_id": 7 if name == "ptd_token_id" else 8}).to_dict()
    assert mask_token(document) == mask_token(document, True) == get_parallel_drafting_token_id(LlamaConfig(**document))
    assert mask_token(document, parallel_drafting=False) is None


def test_a_checkpoint_without_a_mask_token_drafts_token_by_token_and_cannot_be_asked_for_more():
    assert mask_token({"mask_token_id": None}) is None
    with pytest.raises(ConfigError, match=r"drafter\.parallel_drafting: .*names no mask token"):
        mask_token({}, parallel_drafting=True)


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED], ids=["greedy", "coupled"])
@pytest.mark.parametrize("num_paths", [2, 4, 9])
def test_a_pass_gives_further_paths_too_and_nothing_is_drafted_ahead(sampling, num_paths):
    bench = Bench(one_pass=True).opened(sampling=sampling)
    bench.commit(KEY, [999], num_paths=num_paths)
    (answer,) = bench.step()
    main = ids(answer)
    assert main == bench.drafts(KEY, K)
    assert len(answer.paths) == min(num_paths - 1, 2 * K), "two other tokens are named at each position"
    assert [path.gain for path in answer.paths] == sorted((path.gain for path in answer.paths), reverse=True)
    assert len({tuple(path.token_ids) for path in answer.paths}) == len(answer.paths)
    for path in answer.paths:
        (at,) = [index for index in range(K) if path.token_ids[index] != main[index]]
        assert path.token_ids[at] in {bench.choice(KEY, at, rank) for rank in (1, 2)}
    assert bench.step() is None, "the outcome is drafted for when it is known"


def test_the_path_that_verification_took_is_the_text_of_the_next_round():
    bench = Bench(one_pass=True).opened()
    bench.commit(KEY, [999], num_paths=4)
    (answer,) = bench.step()
    for num_paths in (4, 4, 1):
        assert bench.commit(KEY, [*answer.paths[1].token_ids, 998], num_paths=num_paths) == []
        (answer,) = bench.step()
        assert ids(answer) == bench.drafts(KEY, K)
    assert answer.paths == ()
    bench.settle()
    answer = bench.answer(KEY, [*ids(answer), bench.choice(KEY, K, 0)], num_paths=4)
    assert (ids(answer), len(answer.paths)) == (bench.drafts(KEY, K), 3), "a chain's drafts ahead become a tree"
