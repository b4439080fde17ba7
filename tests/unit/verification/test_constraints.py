import pytest
import torch

from outrider.actors.verification.constraints import PREFIX, Constraints
from tests.unit.verification.whole_rows import constrain_logits, processed_probs


def constraints(rows: int, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> Constraints:
    k = torch.as_tensor(top_k).expand(rows)
    p = torch.as_tensor(top_p).expand(rows)
    m = torch.as_tensor(min_p).expand(rows)
    return Constraints(
        temperature=torch.full((rows,), temperature),
        top_k=k,
        top_p=p,
        min_p=m,
        max_top_k=int(k.max()),
        all_top_k=bool((k > 0).all()),
        any_top_p=bool((p < 1).any()),
        any_min_p=bool((m > 0).any()),
    )


def by_hand(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The kept tokens of one row, step by step in the plain sampler's order."""
    p = (torch.tensor(logits, dtype=torch.float64) / temperature).softmax(-1).tolist()
    kept = [x for x in range(len(p)) if p[x] >= min_p * max(p)]
    kept.sort(key=lambda x: -p[x])
    if top_k > 0:
        kept = kept[:top_k]
    total, before, result = sum(p[x] for x in kept), 0.0, set()
    for x in kept:
        if top_p == 1 or before < top_p * total:
            result.add(x)
        before += p[x]
    return result


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("top_k", [0, 1, 7, 50])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.1])
@pytest.mark.parametrize("min_p", [0.0, 0.02])
@pytest.mark.parametrize("spread", [0.5, 4.0])
def test_same_tokens_as_step_by_step(temperature, top_k, top_p, min_p, spread):
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(2)) * spread
    kept = constrain_logits(logits, constraints(6, temperature, top_k, top_p, min_p)).isfinite()
    for row in range(6):
        expected = by_hand(logits[row].tolist(), temperature, top_k, top_p, min_p)
        assert set(kept[row].nonzero().flatten().tolist()) == expected


def test_rows_of_different_requests_do_not_touch_each_other():
    logits = torch.randn(4, 2 * PREFIX, generator=torch.Generator().manual_seed(3))
    top_k, top_p, min_p = torch.tensor([0, 3, 0, 40]), torch.tensor([1.0, 1.0, 0.7, 0.5]), torch.tensor([0.1, 0, 0, 0])
    together = constrain_logits(logits, constraints(4, 0.8, top_k, top_p, min_p))
    for row in range(4):
        part = slice(row, row + 1)
        alone = constrain_logits(logits[part], constraints(1, 0.8, top_k[part], top_p[part], min_p[part]))
        assert torch.equal(together[part], alone)


def test_ties_at_the_kth_place_count_whoever_shares_the_batch():
    """Rows of half-precision logits are full of ties. top_p's mass is that of all tokens that top_k keeps."""
    logits = (torch.randn(300, 500, generator=torch.Generator().manual_seed(5)) * 3).bfloat16().float()
    logits[0] = -10.0
    logits[0, :4] = torch.tensor([5.0, 4.0, 4.0, 4.0])
    top_k, top_p = torch.full((300,), 20), torch.full((300,), 0.8)
    top_k[0], top_p[0] = 2, 0.7
    alone = constrain_logits(logits, constraints(300, 1.0, top_k, top_p))
    assert alone[0].isfinite().tolist()[:5] == [True, True, True, True, False]
    with_neighbour = constrain_logits(
        torch.cat([logits, logits[:1]]),
        constraints(301, 1.0, torch.cat([top_k, torch.tensor([0])]), torch.cat([top_p, torch.tensor([1.0])])),
    )
    assert torch.equal(with_neighbour[:300], alone)


@pytest.mark.parametrize("spread", [0.1, 5.0])
def test_top_p_beyond_the_sorted_prefix(spread):
    """Flat rows need more than the prefix, peaked ones do not: the same rule."""
    logits = torch.randn(2, 3 * PREFIX, generator=torch.Generator().manual_seed(4)) * spread
    kept = constrain_logits(logits, constraints(2, top_p=0.95)).isfinite()
    for row in range(2):
        assert set(kept[row].nonzero().flatten().tolist()) == by_hand(logits[row].tolist(), 1.0, 0, 0.95, 0.0)


def test_ties_with_the_threshold_are_kept_and_the_likeliest_token_always():
    logits = torch.tensor([[1.0, 1.0, 1.0, 0.0]])
    assert constrain_logits(logits, constraints(1, top_k=2)).isfinite().tolist() == [[True, True, True, False]]
    assert constrain_logits(logits, constraints(1, min_p=1.0)).isfinite().tolist() == [[True, True, True, False]]
    peaked = processed_probs(torch.tensor([[5.0, 0.0]]), constraints(1, top_p=1e-6))
    assert peaked.tolist() == [[1.0, 0.0]]
