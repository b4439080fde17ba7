"""Drawing from a cut vocabulary: as from the full one with the other tokens forbidden."""

import math

import pytest
import torch

from actors.drafting.draw import Draws
from actors.messages import DraftSampling, SparseQ
from actors.verification.mode import Mode
from actors.verification.token_subset import TokenSubset
from tests.unit.drafting.draw_cases import INF, ONLY, SAMPLINGS, VOCAB, draw_row, draw_steps, random_logits


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
    sampling = SAMPLINGS[name]
    rows = [draw_row(str(i), sampling, 10 + i, 10 + i) for i in range(6)]
    names = [row.row_id for row in rows]
    ids, logits, full = subset_and_full(size, 6, size)
    steps, full_steps = [(names, logits, alternatives)] * 2, [(names, full, alternatives)] * 2
    cut, whole = draw_steps(rows, steps, ids), draw_steps(rows, full_steps)
    kept = draw_steps(rows, steps, TokenSubset(ids))
    for row_id in names:
        assert cut[row_id].token_ids == whole[row_id].token_ids == kept[row_id].token_ids
        assert set(cut[row_id].token_ids) <= set(ids.tolist())
        both = cut[row_id], whole[row_id]
        for field in ("q_ids", "q_probs", "alternatives", "confidence"):
            left, right = (getattr(row, field) for row in both)
            assert (left is None) == (right is None)
            if left is None:
                continue
            assert left.dtype == right.dtype
            if field == "q_ids":
                left, right = (
                    torch.where(torch.from_numpy(r.q_probs) > 0, torch.from_numpy(r.q_ids), -1) for r in both
                )
            else:
                left, right = torch.from_numpy(left), torch.from_numpy(right)
            width = min(left.shape[1], right.shape[1])  # q is no wider than the vocabulary
            torch.testing.assert_close(left[:, :width], right[:, :width], atol=1e-6, rtol=1e-5)
        if cut[row_id].q_ids is not None:
            SparseQ(cut[row_id].q_ids, cut[row_id].q_probs)


def test_equal_logits_are_drawn_by_the_lowest_id_wherever_it_stands():
    ids = torch.tensor([70, 9, 400, 3, 80])
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0]])
    drawn = draw_steps([draw_row("a", DraftSampling())], [(["a"], logits, 2)], ids)["a"]
    assert drawn.token_ids == [9]
    assert sorted(drawn.alternatives[0].tolist()) == [80, 400]


ENDLESS = {
    "rejection": DraftSampling(Mode.REJECTION, temperature=1.0, biases=((3, 1.0),), only_biased=True),
    "coupled": DraftSampling(Mode.COUPLED, temperature=1.0, biases=((3, 0.0), (4, -INF)), only_biased=True),
    "greedy": DraftSampling(biases=((3, 0.0), (9, -INF)), only_biased=True),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_row_whose_allowed_tokens_are_all_outside_ends_without_a_draft_or_a_warning(name):
    ids, logits, _ = subset_and_full(1, 2, 300, vocab=VOCAB)
    ids = torch.where(ids == 3, VOCAB, ids)
    rows = [draw_row("none", ENDLESS[name]), draw_row("some", SAMPLINGS["biased"])]
    drawn = draw_steps(rows, [(["none", "some"], logits, 1)] * 2, ids)
    none, some = drawn["none"], drawn["some"]
    assert (none.token_ids, none.q_ids, none.q_probs, none.alternatives, none.confidence) == (
        [],
        None,
        None,
        None,
        None,
    )
    assert (none.exhausted, none.bad_logits) == (True, False)
    assert (len(some.token_ids), some.exhausted, some.bad_logits) == (2, False, False)


@pytest.mark.parametrize("mode", list(Mode))
def test_biases_of_tokens_outside_are_dropped_and_the_others_count(mode):
    ids = torch.tensor([77, 400, 5, 3, 60])
    sampling = DraftSampling(mode, temperature=3.0, seed=1, top_n=8, biases=ONLY, only_biased=True)
    names = [str(i) for i in range(40)]
    rows = [draw_row(name, sampling, position) for position, name in enumerate(names)]
    drawn = draw_steps(rows, [(names, torch.zeros(40, 5), 0)], ids)
    tokens = {drawn[name].token_ids[0] for name in names}
    assert tokens == ({3} if mode is Mode.GREEDY else {3, 77})
    assert not any(drawn[name].exhausted for name in names)


@pytest.mark.parametrize("name", [name for name in SAMPLINGS if name not in ("greedy-only", "coupled-only", "only")])
@pytest.mark.parametrize("bad", [math.nan, INF, -INF])
def test_bad_logits_of_a_cut_vocabulary_end_the_row_with_a_valid_id(name, bad):
    ids, logits, _ = subset_and_full(2, 2, 400)
    logits[0, 7 if bad > 0 else slice(None)] = bad
    rows = [draw_row("bad", SAMPLINGS[name]), draw_row("good", SAMPLINGS[name])]
    draws = Draws(rows, ids)
    tokens = draws.draw(logits, ["bad", "good"], alternatives=2)
    assert int(tokens[0]) in ids.tolist()
    drawn = draws.results({"bad": [int(tokens[0])], "good": [int(tokens[1])]})
    assert (drawn["bad"].token_ids, drawn["bad"].bad_logits, drawn["bad"].exhausted) == ([], True, False)
    assert len(drawn["good"].token_ids) == 1


def test_a_vocabulary_of_another_size_than_the_logits_is_an_error():
    draws = Draws([draw_row("a", DraftSampling())], torch.arange(7))
    with pytest.raises(ValueError, match="vocab_ids: 7 tokens for 500 columns of logits"):
        draws.draw(random_logits(1), ["a"])
