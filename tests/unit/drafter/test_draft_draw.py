"""Checks drawn drafts: each row as if drawn alone, from the q that is sent, and from a cut vocabulary too."""

import math

import numpy as np
import pytest
import torch

from outrider.actors.drafter.draw import draw
from outrider.actors.drafter.engine import Drawn
from outrider.actors.verification.search import TokenSubset
from outrider.cluster.link.messages import DraftSampling, SparseQ
from outrider.cluster.modes import Mode
from tests.unit.drafter.draw_cases import (
    INF,
    ONLY,
    SAMPLINGS,
    VOCAB,
    check_against_hand,
    draw_of,
    random_logits,
)


@pytest.mark.parametrize("seed", range(10))
def test_rows_of_all_kinds_in_one_batch_are_drawn_as_each_alone(seed):
    names = [*SAMPLINGS, *reversed(SAMPLINGS)]
    logits = random_logits(len(names), seed)
    before = logits.clone()
    drawn = draw(logits, [draw_of(SAMPLINGS[name], 10 + place) for place, name in enumerate(names)])
    assert torch.equal(logits, before)
    assert len(drawn) == len(names)
    for place, name in enumerate(names):
        check_against_hand(drawn[place], SAMPLINGS[name], logits[place], 10 + place)


@pytest.mark.parametrize("name", ["rejection", "coupled", "block"])
def test_noise_belongs_to_the_position_and_to_the_round_that_it_is_drawn_for(name):
    logits = random_logits(1, 5).repeat(40, 1) * 0.1
    sampling, positions = SAMPLINGS[name], range(10, 50)
    drawn = draw(logits, [draw_of(sampling, position, 10) for position in positions])
    for one, position in zip(drawn, positions, strict=True):
        check_against_hand(one, sampling, logits[0], position, 10)
    assert len({one.token for one in drawn}) > 3
    of_another_round = draw(logits, [draw_of(sampling, position, 9) for position in positions])
    same = [one.token for one in of_another_round] == [one.token for one in drawn]
    assert same == (name == "coupled")


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("only", [False, True])
def test_biases_of_tokens_that_the_draft_model_lacks_are_dropped_and_the_others_count(mode, only):
    """A target's vocabulary may be padded further than the drafter's."""
    biases = ((3, 9.0), (VOCAB, 50.0), (VOCAB + 100, -INF), (7, -INF))
    sampling = DraftSampling(mode, temperature=1.0, seed=1, top_n=8, biases=biases, only_biased=only)
    known = DraftSampling(mode, temperature=1.0, seed=1, top_n=8, biases=(biases[0], biases[3]), only_biased=only)
    logits = random_logits(30, 3)
    found, wanted = (draw(logits, [draw_of(each, p) for p in range(30)]) for each in (sampling, known))
    for one, expected in zip(found, wanted, strict=True):
        assert (one.token, one.usable) == (expected.token, True)
        assert only <= (one.token == 3)
        if one.q_ids is not None:
            assert one.q_ids.max() < VOCAB
            assert one.q_probs.tolist() == expected.q_probs.tolist()


@pytest.mark.parametrize("mode", list(Mode))
def test_a_row_that_may_draw_nothing_but_what_the_draft_model_lacks_has_no_draft(mode):
    lacks = DraftSampling(mode, temperature=1.0, seed=1, top_n=8, biases=((VOCAB + 3, 1.0),), only_biased=True)
    none, some = draw(random_logits(2), [draw_of(lacks), draw_of(SAMPLINGS["biased"])])
    assert none == Drawn(-1, usable=False, bad_logits=False)
    assert some.usable


def test_half_precision_logits_and_slices_of_wider_rows_are_taken():
    wide = random_logits(3, vocab=VOCAB + 12).to(torch.bfloat16)
    names = ["rejection", "coupled", "greedy"]
    drawn = draw(wide[:, :VOCAB], [draw_of(SAMPLINGS[name]) for name in names])
    for place, name in enumerate(names):
        check_against_hand(drawn[place], SAMPLINGS[name], wide[place, :VOCAB].float(), 10)


@pytest.mark.parametrize("mode", list(Mode))
def test_forbidden_tokens_are_never_drawn_and_have_no_q(mode):
    samplings = [
        DraftSampling(mode, temperature=3.0, seed=seed, top_n=8, biases=ONLY, only_biased=True) for seed in range(300)
    ]
    drawn = draw(random_logits(300, 3), [draw_of(sampling) for sampling in samplings])
    assert {one.token for one in drawn} == {3, 50, 77}
    for one in drawn:
        if one.q_ids is not None:
            q = dict(zip(one.q_ids.tolist(), one.q_probs.tolist(), strict=True))
            assert {token for token, prob in q.items() if prob > 0} == {3, 50, 77}


@pytest.mark.parametrize("alternatives", [0, 2])
@pytest.mark.parametrize("bad", ["nan", "one nan", "inf", "-inf"])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_row_of_bad_logits_has_no_draft_and_the_others_have(name, bad, alternatives):
    logits = random_logits(3)
    if bad == "one nan":
        logits[1, 77] = math.nan
    elif bad == "inf":
        logits[1, 77] = INF
    else:
        logits[1] = float(bad)
    first, found, last = draw(logits, [draw_of(SAMPLINGS[name], 10 + i, 10, alternatives) for i in range(3)])
    assert found == Drawn(-1, usable=False, bad_logits=True)
    check_against_hand(first, SAMPLINGS[name], logits[0], 10, 10)
    check_against_hand(last, SAMPLINGS[name], logits[2], 12, 10)


@pytest.mark.parametrize("temperature", [1e-300, 1e-3, 1.0])
def test_a_probability_that_underflows_is_never_drawn(temperature):
    logits = torch.full((1, VOCAB), -1000.0)
    logits[0, 4], logits[0, 2] = 0.0, -90.0  # exp(-90) is no normal float32
    samplings = [DraftSampling(Mode.BLOCK, temperature, seed=seed, top_n=8) for seed in range(200)]
    for drawn in draw(logits.repeat(200, 1), [draw_of(sampling) for sampling in samplings]):
        assert drawn.token == 4
        SparseQ(drawn.q_ids[None], drawn.q_probs[None])


@pytest.mark.parametrize("temperature", [1e-300, 1e300])
@pytest.mark.parametrize("mode", [Mode.REJECTION, Mode.COUPLED])
def test_extreme_temperatures_are_no_harm(mode, temperature):
    sampling = DraftSampling(mode, temperature, top_k=30, top_p=0.9, min_p=1e-300, seed=3)
    (drawn,) = draw(random_logits(1), [draw_of(sampling)])
    assert drawn.usable
    if drawn.q_ids is not None:
        SparseQ(drawn.q_ids[None], drawn.q_probs[None])


@pytest.mark.parametrize("top_k", [VOCAB, VOCAB + 1])
def test_a_top_k_of_all_tokens_limits_nothing(top_k):
    logits, modes = random_logits(20), (Mode.COUPLED, Mode.REJECTION)
    samplings = [[DraftSampling(mode, temperature=3.0, top_k=k, seed=3) for mode in modes * 10] for k in (0, top_k)]
    free, limited = ([one.token for one in draw(logits, [draw_of(each) for each in of])] for of in samplings)
    assert limited == free
    assert free != logits.argmax(1).tolist()


def test_greedy_alternatives_are_the_next_logits_with_plain_probabilities():
    logits = random_logits(1)
    (drawn,) = draw(logits, [draw_of(DraftSampling(temperature=0.0), alternatives=3)])
    top = logits[0].topk(4).indices
    tokens, shares = zip((drawn.token, drawn.confidence), *drawn.alternatives, strict=True)
    assert list(tokens) == top.tolist()
    torch.testing.assert_close(torch.tensor(shares), logits[0].softmax(-1)[top])


def test_alternatives_of_rejection_are_the_likeliest_of_q_without_the_token_drawn():
    logits = random_logits(1).repeat(50, 1) * 0.3
    drawn = draw(logits, [draw_of(SAMPLINGS["rejection"], position, alternatives=2) for position in range(50)])
    assert len({one.token for one in drawn}) > 2
    for one in drawn:
        q = dict(zip(one.q_ids.tolist(), one.q_probs.tolist(), strict=True))
        others = [(token, prob) for token, prob in q.items() if token != one.token][:2]
        assert one.alternatives == tuple(others)
        assert one.confidence == q[one.token]


@pytest.mark.parametrize("alternatives", [3, 8])
def test_alternatives_beyond_what_may_be_drawn_are_not_named(alternatives):
    allowed = ((5, 0.0), (6, 0.0), (7, -INF))
    samplings = [
        DraftSampling(Mode.COUPLED, temperature=1.0, top_k=2, seed=3),
        DraftSampling(Mode.COUPLED, temperature=1.0, seed=3, biases=allowed, only_biased=True),
        DraftSampling(Mode.REJECTION, temperature=1.0, top_k=2, seed=3, top_n=2),
        DraftSampling(biases=allowed, only_biased=True),
    ]
    logits = random_logits(4, vocab=2000)
    for drawn in draw(logits, [draw_of(sampling, alternatives=alternatives) for sampling in samplings]):
        ((other, share),) = drawn.alternatives
        assert other != drawn.token
        assert drawn.confidence + share == pytest.approx(1)


def subset_and_full(seed, rows, size, spread=3.0, vocab=2000):
    """Ids in any order, logits over them, and logits over the whole vocabulary with the others forbidden."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randperm(vocab, generator=generator)[:size]
    logits = torch.randn(rows, size, generator=generator) * spread
    full = torch.full((rows, vocab), -INF)
    full[:, ids] = logits
    return ids, logits, full


@pytest.mark.parametrize("alternatives", [0, 1, 3])
@pytest.mark.parametrize("size", [1500, 1024, 200])
@pytest.mark.parametrize("name", [name for name in SAMPLINGS if "only" not in name])
def test_a_cut_vocabulary_draws_as_the_full_one_with_the_other_tokens_forbidden(name, size, alternatives):
    draws = [draw_of(SAMPLINGS[name], 10 + i, alternatives=alternatives) for i in range(6)]
    ids, logits, full = subset_and_full(size, 6, size)
    for cut, whole in zip(draw(logits, draws, TokenSubset(ids)), draw(full, draws), strict=True):
        assert cut.token == whole.token
        assert cut.token in ids.tolist()
        assert cut.confidence == pytest.approx(whole.confidence, rel=1e-5)
        assert [token for token, _ in cut.alternatives] == [token for token, _ in whole.alternatives]
        assert [p for _, p in cut.alternatives] == pytest.approx([p for _, p in whole.alternatives], rel=1e-5, abs=1e-6)
        assert (cut.q_ids is None) == (whole.q_ids is None)
        if cut.q_ids is not None:
            SparseQ(cut.q_ids[None], cut.q_probs[None])
            width = min(len(cut.q_ids), len(whole.q_ids))  # q is no wider than the vocabulary
            possible, expected = (np.where(one.q_probs > 0, one.q_ids, -1)[:width] for one in (cut, whole))
            assert possible.tolist() == expected.tolist()
            np.testing.assert_allclose(cut.q_probs[:width], whole.q_probs[:width], atol=1e-6, rtol=1e-5)


def test_equal_logits_are_drawn_by_the_lowest_id_wherever_it_stands():
    subset = TokenSubset(torch.tensor([70, 9, 400, 3, 80]))
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0]])
    (drawn,) = draw(logits, [draw_of(DraftSampling(), alternatives=2)], subset)
    assert drawn.token == 9
    assert sorted(token for token, _ in drawn.alternatives) == [80, 400]


ENDLESS = {
    "rejection": DraftSampling(Mode.REJECTION, temperature=1.0, biases=((3, 1.0),), only_biased=True),
    "coupled": DraftSampling(Mode.COUPLED, temperature=1.0, biases=((3, 0.0), (4, -INF)), only_biased=True),
    "greedy": DraftSampling(biases=((3, 0.0), (9, -INF)), only_biased=True),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_row_whose_allowed_tokens_are_all_outside_has_no_draft_and_its_logits_are_not_to_blame(name):
    ids, logits, _ = subset_and_full(1, 2, 300, vocab=VOCAB)
    subset = TokenSubset(torch.where(ids == 3, VOCAB, ids))
    none, some = draw(logits, [draw_of(s, alternatives=1) for s in (ENDLESS[name], SAMPLINGS["biased"])], subset)
    assert none == Drawn(-1, usable=False, bad_logits=False)
    assert some.usable


@pytest.mark.parametrize("mode", list(Mode))
def test_biases_of_tokens_outside_are_dropped_and_the_others_count(mode):
    subset = TokenSubset(torch.tensor([77, 400, 5, 3, 60]))
    sampling = DraftSampling(mode, temperature=3.0, seed=1, top_n=8, biases=ONLY, only_biased=True)
    drawn = draw(torch.zeros(40, 5), [draw_of(sampling, position) for position in range(40)], subset)
    assert {one.token for one in drawn} == ({3} if mode is Mode.GREEDY else {3, 77})
    assert all(one.usable for one in drawn)
