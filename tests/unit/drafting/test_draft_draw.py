"""Drawing drafts: every row as if it were drawn alone, from exactly the q that is shipped, where the round says."""

import math

import pytest
import torch

from actors.drafting.draw import Draws
from actors.messages import DraftSampling, SparseQ
from actors.verification.mode import Mode
from tests.unit.drafting.draw_cases import (
    INF,
    ONLY,
    SAMPLINGS,
    VOCAB,
    by_hand,
    check_against_hand,
    draw_row,
    draw_steps,
    first_row,
    random_logits,
    run,
)


@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_row_alone(name):
    logits = random_logits(1)
    (drafted,) = run([first_row("a", SAMPLINGS[name])], [(["a"], logits)]).values()
    check_against_hand(drafted, SAMPLINGS[name], logits, 10)


@pytest.mark.parametrize("seed", range(10))
def test_rows_of_all_kinds_in_one_batch_are_drawn_as_each_alone(seed):
    names = list(SAMPLINGS)
    rows = [first_row(name, SAMPLINGS[name], committed_len=10 + place) for place, name in enumerate(names)]
    logits = random_logits(len(names), seed)
    drafted = run(rows, [(names, logits)])
    assert drafted.keys() == set(names)
    for place, name in enumerate(names):
        check_against_hand(drafted[name], SAMPLINGS[name], logits[place : place + 1], 10 + place)


def test_steps_move_the_position_and_not_the_round_and_rows_may_end_and_move():
    rows = [
        first_row("a", SAMPLINGS["rejection"], 10),
        first_row("b", SAMPLINGS["rejection"], 20),
        first_row("c", SAMPLINGS["coupled"], 30),
    ]
    orders = [["a", "prefill", "b", "c"], ["b", "a", "c"], ["c", "a"], ["a"]]
    steps = [(order, random_logits(len(order), seed)) for seed, order in enumerate(orders)]
    drafted = run(rows, steps)
    assert drafted.keys() == {"a", "b", "c"}
    for row in rows:
        seen = [logits[order.index(row.row_id)] for order, logits in steps if row.row_id in order]
        check_against_hand(drafted[row.row_id], row.sampling, seen, row.position)


def test_a_batch_without_drafts_draws_nothing():
    assert run([], [(["a"], random_logits(1))]) == {}


def test_half_precision_logits_and_slices_of_wider_rows_are_taken():
    wide = random_logits(2, vocab=VOCAB + 12).to(torch.bfloat16)
    rows = [first_row("a", SAMPLINGS["rejection"]), first_row("b", SAMPLINGS["coupled"])]
    drafted = run(rows, [(["a", "b"], wide[:, :VOCAB])])
    for place, row in enumerate(rows):
        check_against_hand(drafted[row.row_id], row.sampling, wide[place : place + 1, :VOCAB].float(), 10)


@pytest.mark.parametrize("mode", list(Mode))
def test_forbidden_tokens_are_never_drawn_and_have_no_q(mode):
    seeds = range(300)
    samplings = [
        DraftSampling(mode, temperature=3.0, seed=seed, top_n=8, biases=ONLY, only_biased=True) for seed in seeds
    ]
    names = [str(seed) for seed in seeds]
    rows = [first_row(name, sampling) for name, sampling in zip(names, samplings, strict=True)]
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
    drafted = run([first_row(str(i), s) for i, s in enumerate(samplings)], [(["0", "1", "2"], logits)])
    second = int(logits[0].topk(2).indices[1])
    assert [drafted[str(i)].token_ids for i in range(3)] == [[likeliest], [second], [9]]


@pytest.mark.parametrize("bad", ["nan", "one nan", "inf", "-inf"])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_row_ends_where_its_logits_are_bad_and_the_others_go_on(name, bad):
    rows = [first_row("bad", SAMPLINGS[name], 10), first_row("good", SAMPLINGS[name], 20)]
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
    (drafted,) = run([first_row("a", SAMPLINGS["rejection"])], [(["a"], torch.full((1, VOCAB), math.nan))]).values()
    assert (drafted.token_ids, drafted.q_ids, drafted.q_probs, drafted.bad_logits) == ([], None, None, True)


def test_biases_that_forbid_all_there_is_end_the_row():
    logits = torch.full((1, VOCAB), -INF)
    logits[0, 5] = 1.0
    sampling = DraftSampling(Mode.REJECTION, temperature=1.0, biases=((5, -INF),))
    assert run([first_row("a", sampling)], [(["a"], logits)])["a"].bad_logits


@pytest.mark.parametrize("temperature", [1e-300, 1e-3, 1.0])
def test_a_probability_that_underflows_is_never_drawn(temperature):
    logits = torch.full((1, VOCAB), -1000.0)
    logits[0, 4], logits[0, 2] = 0.0, -90.0  # exp(-90) is no normal float32
    names = [str(seed) for seed in range(200)]
    rows = [first_row(name, DraftSampling(Mode.BLOCK, temperature, seed=int(name), top_n=8)) for name in names]
    for drafted in run(rows, [(names, logits.repeat(len(names), 1))]).values():
        assert drafted.token_ids == [4]
        SparseQ(drafted.q_ids, drafted.q_probs)


@pytest.mark.parametrize("temperature", [1e-300, 1e300])
@pytest.mark.parametrize("mode", [Mode.REJECTION, Mode.COUPLED])
def test_extreme_temperatures_are_no_harm(mode, temperature):
    sampling = DraftSampling(mode, temperature, top_k=30, top_p=0.9, min_p=1e-300, seed=3)
    drafted = run([first_row("a", sampling)], [(["a"], random_logits(1))])["a"]
    assert not drafted.bad_logits
    assert len(drafted.token_ids) == 1
    if drafted.q_ids is not None:
        SparseQ(drafted.q_ids, drafted.q_probs)


def test_ids_that_do_not_match_the_draws_are_an_error():
    draws = Draws([first_row("a", SAMPLINGS["rejection"])])
    draws.draw(random_logits(1), ["a"])
    with pytest.raises(RuntimeError, match="0 draft ids of 1 drawn"):
        draws.results({"a": []})


def test_a_row_that_joins_late_starts_at_its_own_position_and_one_that_pauses_goes_on_at_its_own():
    rows = [
        draw_row("main", SAMPLINGS["rejection"], 10, 10),
        draw_row("branch", SAMPLINGS["rejection"], 33, 31),
        draw_row("coupled", SAMPLINGS["coupled"], 50, 50),
    ]
    orders = [
        ["main", "coupled"],
        ["main", "coupled"],
        ["coupled", "branch"],
        ["branch", "main", "coupled"],
        ["branch"],
    ]
    steps = [(order, random_logits(len(order), seed), 0) for seed, order in enumerate(orders)]
    drawn = draw_steps(rows, steps)
    for row in rows:
        seen = [logits[order.index(row.row_id)] for order, logits, _ in steps if row.row_id in order]
        assert len(drawn[row.row_id].token_ids) == len(seen)
        for index, (token, logits) in enumerate(zip(drawn[row.row_id].token_ids, seen, strict=True)):
            assert token == int(by_hand(row.sampling, logits, row.position + index, row.round_start).ids)


def test_greedy_alternatives_are_the_next_logits_with_plain_probabilities():
    logits = random_logits(1)
    drawn = draw_steps([draw_row("a", DraftSampling(temperature=0.0))], [(["a"], logits, 3)])["a"]
    top = logits[0].topk(4)
    assert [drawn.token_ids[0], *drawn.alternatives[0].tolist()] == top.indices.tolist()
    torch.testing.assert_close(torch.from_numpy(drawn.confidence[0]), logits[0].softmax(-1)[top.indices])
    assert (drawn.alternatives.dtype, drawn.confidence.dtype) == ("int32", "float32")


def test_alternatives_of_rejection_are_the_likeliest_of_q_without_the_token_drawn():
    names = [str(i) for i in range(50)]
    rows = [draw_row(name, SAMPLINGS["rejection"], position) for position, name in enumerate(names)]
    drawn = draw_steps(rows, [(names, random_logits(1).repeat(50, 1) * 0.3, 2)])
    assert len({drawn[name].token_ids[0] for name in names}) > 2
    for name in names:
        row = drawn[name]
        q = dict(zip(row.q_ids[0].tolist(), row.q_probs[0].tolist(), strict=True))
        others = [token for token in q if token != row.token_ids[0]][:2]
        assert row.alternatives[0].tolist() == others
        assert row.confidence[0].tolist() == [q[row.token_ids[0]], *(q[token] for token in others)]


def test_alternatives_beyond_what_may_be_drawn_are_none():
    samplings = {
        "coupled": DraftSampling(Mode.COUPLED, temperature=1.0, top_k=2, seed=3),
        "rejection": DraftSampling(Mode.REJECTION, temperature=1.0, top_k=2, seed=3, top_n=2),
        "greedy": DraftSampling(biases=((5, 0.0), (6, 0.0), (7, -INF)), only_biased=True),
    }
    drawn = draw_steps([draw_row(n, s) for n, s in samplings.items()], [(list(samplings), random_logits(3), 3)])
    for row in drawn.values():
        assert row.alternatives[0, 1:].tolist() == [-1, -1]
        assert row.alternatives[0, 0] not in (-1, row.token_ids[0])
        assert row.confidence[0, 2:].tolist() == [0, 0]
        assert row.confidence[0].sum() == pytest.approx(1)


def test_steps_may_ask_for_more_and_fewer_alternatives():
    logits = random_logits(1)
    steps = [(["a"], logits, 1), (["a"], logits, 0), (["a"], logits, 2)]
    drawn = draw_steps([draw_row("a", DraftSampling())], steps)["a"]
    second, third = logits[0].topk(3).indices.tolist()[1:]
    assert drawn.alternatives.tolist() == [[second, -1], [-1, -1], [second, third]]
    assert (drawn.confidence[:, 0] > 0).tolist() == [True, False, True]
    assert draw_steps([draw_row("a", DraftSampling())], [(["a"], logits, 0)])["a"].alternatives is None
