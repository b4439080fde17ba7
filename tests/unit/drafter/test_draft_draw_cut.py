"""Drawing from a cut vocabulary: as from the full one with the other tokens forbidden."""

import math

import numpy as np
import pytest
import torch

from outrider.actors.drafter.draw import draw
from outrider.actors.drafter.engine import Drawn
from outrider.actors.verification.search import TokenSubset
from outrider.cluster.link.messages import DraftSampling, SparseQ
from outrider.cluster.modes import Mode
from tests.unit.drafter.draw_cases import INF, ONLY, SAMPLINGS, VOCAB, draw_of, random_logits


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


@pytest.mark.parametrize("name", [name for name in SAMPLINGS if name not in ("greedy-only", "coupled-only", "only")])
@pytest.mark.parametrize("bad", [math.nan, INF, -INF])
def test_bad_logits_of_a_cut_vocabulary_have_no_draft(name, bad):
    ids, logits, _ = subset_and_full(2, 2, 400)
    logits[0, 7 if bad > 0 else slice(None)] = bad
    found, good = draw(logits, [draw_of(SAMPLINGS[name], alternatives=2)] * 2, TokenSubset(ids))
    assert found == Drawn(-1, usable=False, bad_logits=True)
    assert good.usable


def test_a_vocabulary_of_another_size_than_the_logits_is_an_error():
    with pytest.raises(ValueError, match="vocab_ids: 7 tokens for 500 columns of logits"):
        draw(random_logits(1), [draw_of(DraftSampling())], TokenSubset(torch.arange(7)))
