"""Drawing drafts: every row as if it were drawn alone, from exactly the q that is shipped, where the round says."""

import math

import pytest
import torch

from actors.drafting.draft_plan import PlanRow
from actors.drafting.draw import PlanDraws
from actors.messages import DraftSampling, SparseQ
from actors.verification.constraints import Constraints
from actors.verification.draft_sampler import sample_drafts
from actors.verification.mode import Mode

VOCAB = 500
INF = math.inf
ONLY = ((3, 0.0), (50, 2.0), (77, -1.0), (400, -INF))

SAMPLINGS = {
    "greedy": DraftSampling(seed=1),
    "rejection": DraftSampling(Mode.REJECTION, temperature=0.7, seed=2, top_n=8),
    "rejection-64": DraftSampling(Mode.REJECTION, temperature=1.3, top_k=20, top_p=0.9, seed=-3, top_n=64),
    "block": DraftSampling(Mode.BLOCK, temperature=1.0, min_p=0.05, seed=4, top_n=8),
    "coupled": DraftSampling(Mode.COUPLED, temperature=0.9, top_p=0.95, seed=5),
    "coupled-2": DraftSampling(Mode.COUPLED, temperature=1.2, seed=6, top_n=3),
    "one-hot": DraftSampling(Mode.REJECTION, temperature=0.7, seed=7, top_n=0),
    "wide": DraftSampling(Mode.BLOCK, temperature=2.0, seed=8, top_n=1024),
    "biased": DraftSampling(Mode.REJECTION, temperature=1.0, seed=9, top_n=8, biases=((11, 6.0), (12, -INF))),
    "only": DraftSampling(Mode.REJECTION, temperature=1.0, seed=10, top_n=8, biases=ONLY, only_biased=True),
    "greedy-only": DraftSampling(biases=ONLY, only_biased=True),
    "coupled-only": DraftSampling(Mode.COUPLED, temperature=1.0, seed=12, biases=ONLY, only_biased=True),
}


def plan_row(name, sampling, committed_len=10, num_drafts=1):
    return PlanRow(name, committed_len - 1, 1, None, num_drafts, sampling)


def random_logits(rows, seed=0, vocab=VOCAB):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def run(rows, steps):
    """steps: (request ids, logits) of each. Returns Drafted by request."""
    draws = PlanDraws(rows)
    ids = {row.request_id: [] for row in rows if row.num_drafts}
    for request_ids, logits in steps:
        before = logits.clone()
        drawn = draws.draw(logits, request_ids)
        assert (drawn.dtype, list(drawn.shape)) == (torch.int32, [len(request_ids), 1])
        assert torch.equal(logits.nan_to_num(), before.nan_to_num())
        for request_id, (token,) in zip(request_ids, drawn.tolist(), strict=True):
            if request_id in ids:
                ids[request_id].append(token)
            else:
                assert token == 0
    return draws.results(ids)


def by_hand(sampling, logits, position, round_start):
    """sample_drafts for one row. logits: float32 [V]."""
    logits = logits.clone()
    if sampling.only_biased:
        kept = torch.full_like(logits, -INF)
        for token, _ in sampling.biases:
            kept[token] = logits[token]
        logits = kept
    for token, bias in sampling.biases:
        logits[token] += bias
    mode = Mode.GREEDY if sampling.mode.samples_q and not sampling.top_n else sampling.mode
    constraints = Constraints(
        temperature=torch.tensor([sampling.temperature or 1.0]),
        top_k=torch.tensor([sampling.top_k]),
        top_p=torch.tensor([sampling.top_p]),
        min_p=torch.tensor([sampling.min_p]),
        max_top_k=sampling.top_k,
        all_top_k=sampling.top_k > 0,
        any_top_p=sampling.top_p < 1,
        any_min_p=sampling.min_p > 0,
    )
    seed, position, start = (torch.tensor([value]) for value in (sampling.seed, position, round_start))
    return sample_drafts(logits.unsqueeze(0), mode, constraints, seed, position, start, sampling.top_n)


def check_against_hand(drafted, sampling, rows_of_logits, committed_len):
    """rows_of_logits: what each of the drafts was drawn from."""
    assert len(drafted.token_ids) == len(rows_of_logits)
    assert not drafted.bad_logits
    for index, logits in enumerate(rows_of_logits):
        expected = by_hand(sampling, logits, committed_len + index, committed_len)
        assert drafted.token_ids[index] == int(expected.ids)
        if expected.q_ids is None:
            assert drafted.q_ids is None
            continue
        assert (drafted.q_ids.dtype, drafted.q_probs.dtype) == ("int32", "float32")
        assert drafted.q_ids[index].tolist() == expected.q_ids[0].tolist()
        torch.testing.assert_close(torch.from_numpy(drafted.q_probs[index]), expected.q_probs[0], atol=1e-6, rtol=1e-5)
    if drafted.q_ids is not None:
        SparseQ(drafted.q_ids, drafted.q_probs)


@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_row_alone(name):
    logits = random_logits(1)
    (drafted,) = run([plan_row("a", SAMPLINGS[name])], [(["a"], logits)]).values()
    check_against_hand(drafted, SAMPLINGS[name], logits, 10)


@pytest.mark.parametrize("seed", range(10))
def test_rows_of_all_kinds_in_one_batch_are_drawn_as_each_alone(seed):
    names = list(SAMPLINGS)
    rows = [plan_row(name, SAMPLINGS[name], committed_len=10 + place) for place, name in enumerate(names)]
    logits = random_logits(len(names), seed)
    drafted = run(rows, [(names, logits)])
    assert drafted.keys() == set(names)
    for place, name in enumerate(names):
        check_against_hand(drafted[name], SAMPLINGS[name], logits[place : place + 1], 10 + place)


def test_steps_move_the_position_and_not_the_round_and_rows_may_end_and_move():
    rows = [
        plan_row("a", SAMPLINGS["rejection"], 10, num_drafts=4),
        plan_row("b", SAMPLINGS["rejection"], 20, num_drafts=2),
        plan_row("c", SAMPLINGS["coupled"], 30, num_drafts=3),
        PlanRow("prefill", 0, 16, None, 0, SAMPLINGS["rejection"]),
    ]
    orders = [["a", "prefill", "b", "c"], ["b", "a", "c"], ["c", "a"], ["a"]]
    steps = [(order, random_logits(len(order), seed)) for seed, order in enumerate(orders)]
    drafted = run(rows, steps)
    assert drafted.keys() == {"a", "b", "c"}
    for row in rows[:3]:
        seen = [logits[order.index(row.request_id)] for order, logits in steps if row.request_id in order]
        check_against_hand(drafted[row.request_id], row.sampling, seen, row.num_computed + row.num_scheduled)


def test_the_committed_length_counts_what_the_first_step_feeds():
    logits = random_logits(1)
    row = PlanRow("a", 70, 7, None, 1, SAMPLINGS["rejection"])
    check_against_hand(run([row], [(["a"], logits)])["a"], row.sampling, logits, 77)


def test_a_batch_without_drafts_draws_nothing():
    assert run([PlanRow("a", 0, 16, None, 0, SAMPLINGS["rejection"])], [(["a"], random_logits(1))]) == {}


def test_half_precision_logits_and_slices_of_wider_rows_are_taken():
    wide = random_logits(2, vocab=VOCAB + 12).to(torch.bfloat16)
    rows = [plan_row("a", SAMPLINGS["rejection"]), plan_row("b", SAMPLINGS["coupled"])]
    drafted = run(rows, [(["a", "b"], wide[:, :VOCAB])])
    for place, row in enumerate(rows):
        check_against_hand(drafted[row.request_id], row.sampling, wide[place : place + 1, :VOCAB].float(), 10)


@pytest.mark.parametrize("mode", list(Mode))
def test_forbidden_tokens_are_never_drawn_and_have_no_q(mode):
    seeds = range(300)
    samplings = [
        DraftSampling(mode, temperature=3.0, seed=seed, top_n=8, biases=ONLY, only_biased=True) for seed in seeds
    ]
    names = [str(seed) for seed in seeds]
    rows = [plan_row(name, sampling) for name, sampling in zip(names, samplings, strict=True)]
    drafted = run(rows, [(names, random_logits(len(names), 3))])
    tokens = {drafted[name].token_ids[0] for name in names}
    assert tokens == {3, 50, 77}
    for name in names:
        if drafted[name].q_ids is not None:
            q = dict(zip(drafted[name].q_ids[0].tolist(), drafted[name].q_probs[0].tolist(), strict=True))
            assert {token for token, prob in q.items() if prob > 0} == {3, 50, 77}


def test_a_bias_moves_the_choice_of_its_own_row_only():
    logits = random_logits(1).repeat(3, 1)
    likeliest = int(logits[0].argmax())
    samplings = [DraftSampling(), DraftSampling(biases=((likeliest, -INF),)), DraftSampling(biases=((9, 100.0),))]
    drafted = run([plan_row(str(i), s) for i, s in enumerate(samplings)], [(["0", "1", "2"], logits)])
    second = int(logits[0].topk(2).indices[1])
    assert [drafted[str(i)].token_ids for i in range(3)] == [[likeliest], [second], [9]]


@pytest.mark.parametrize("bad", ["nan", "one nan", "inf", "-inf"])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_row_ends_where_its_logits_are_bad_and_the_others_go_on(name, bad):
    rows = [plan_row("bad", SAMPLINGS[name], 10, 3), plan_row("good", SAMPLINGS[name], 20, 3)]
    steps = [(["bad", "good"], random_logits(2, seed)) for seed in range(3)]
    row = steps[1][1][0]
    if bad == "one nan":
        row[77] = math.nan
    elif bad == "inf":
        row[77] = INF
    else:
        row[:] = float(bad)
    drafted = run(rows, steps)
    assert drafted["bad"].bad_logits
    drafted["bad"].bad_logits = False
    check_against_hand(drafted["bad"], SAMPLINGS[name], [steps[0][1][0]], 10)
    check_against_hand(drafted["good"], SAMPLINGS[name], [logits[1] for _, logits in steps], 20)


def test_nothing_is_left_of_a_row_that_is_bad_at_once():
    (drafted,) = run([plan_row("a", SAMPLINGS["rejection"])], [(["a"], torch.full((1, VOCAB), math.nan))]).values()
    assert (drafted.token_ids, drafted.q_ids, drafted.q_probs, drafted.bad_logits) == ([], None, None, True)


def test_biases_that_forbid_all_there_is_end_the_row():
    logits = torch.full((1, VOCAB), -INF)
    logits[0, 5] = 1.0
    sampling = DraftSampling(Mode.REJECTION, temperature=1.0, biases=((5, -INF),))
    assert run([plan_row("a", sampling)], [(["a"], logits)])["a"].bad_logits


@pytest.mark.parametrize("temperature", [1e-300, 1e-3, 1.0])
def test_a_probability_that_underflows_is_never_drawn(temperature):
    logits = torch.full((1, VOCAB), -1000.0)
    logits[0, 4], logits[0, 2] = 0.0, -90.0  # exp(-90) is no normal float32
    names = [str(seed) for seed in range(200)]
    rows = [plan_row(name, DraftSampling(Mode.BLOCK, temperature, seed=int(name), top_n=8)) for name in names]
    for drafted in run(rows, [(names, logits.repeat(len(names), 1))]).values():
        assert drafted.token_ids == [4]
        SparseQ(drafted.q_ids, drafted.q_probs)


@pytest.mark.parametrize("temperature", [1e-300, 1e300])
@pytest.mark.parametrize("mode", [Mode.REJECTION, Mode.COUPLED])
def test_extreme_temperatures_are_no_harm(mode, temperature):
    sampling = DraftSampling(mode, temperature, top_k=30, top_p=0.9, min_p=1e-300, seed=3)
    drafted = run([plan_row("a", sampling)], [(["a"], random_logits(1))])["a"]
    assert not drafted.bad_logits
    assert len(drafted.token_ids) == 1
    if drafted.q_ids is not None:
        SparseQ(drafted.q_ids, drafted.q_probs)


def test_ids_that_do_not_match_the_draws_are_an_error():
    draws = PlanDraws([plan_row("a", SAMPLINGS["rejection"], num_drafts=2)])
    draws.draw(random_logits(1), ["a"])
    with pytest.raises(RuntimeError, match="0 draft ids of 1 drawn"):
        draws.results({"a": []})
