import math

import pytest
import torch

from outrider.actors.verification import torch_kernel
from outrider.actors.verification.coupled import coupled_ranking
from outrider.actors.verification.draft_sampler import sample_drafts
from outrider.actors.verification.noise import gumbel
from outrider.actors.verification.search import TokenSubset, search_maxima, top_n
from outrider.actors.verification.torch_draws import greedy_choice
from outrider.cluster.modes import Mode
from tests.support.devices.counting_device import DEVICE, CountingDevice
from tests.unit.verification.arrays import build, uniform
from tests.unit.verification.toy_target import plain_constraints
from tests.unit.verification.whole_rows import constrain_logits


def test_drafts_are_distributed_as_the_q_that_is_sent():
    rows = 100_000
    logits = torch.tensor([1.0, -0.5, 2.0, 0.3, -3.0, 1.1]).repeat(rows, 1)
    position = torch.full((rows,), 4)
    drawn = sample_drafts(
        logits, Mode.BLOCK, plain_constraints(rows, 0.8), torch.arange(rows), position, position - 1, n=4
    )
    assert drawn.q_ids is not None
    assert drawn.q_probs is not None
    assert drawn.q_ids[0].tolist() == [2, 5, 0, 3]
    assert torch.allclose(drawn.q_probs[0], (logits[0, [2, 5, 0, 3]] / 0.8).softmax(-1))
    expected = torch.zeros(6, dtype=torch.float64)
    expected[drawn.q_ids[0]] = drawn.q_probs[0].to(torch.float64) * rows
    counts = torch.bincount(drawn.ids, minlength=6)
    assert not counts[expected == 0].any()
    statistic = ((counts - expected) ** 2 / expected)[expected > 0].sum()
    # Three degrees of freedom, false alarm 1e-6.
    assert torch.special.gammaincc(torch.tensor(1.5, dtype=torch.float64), statistic / 2) > 1e-6


def test_tokens_under_the_threshold_are_listed_at_zero_and_never_drawn():
    rows = 1000
    logits = torch.tensor([3.0, 2.0, 1.0, 0.0, -1.0]).repeat(rows, 1)
    position = torch.zeros(rows, dtype=torch.int64)
    drawn = sample_drafts(
        logits, Mode.REJECTION, plain_constraints(rows, top_k=2), torch.arange(rows), position, position, n=4
    )
    assert drawn.q_probs is not None
    assert (drawn.q_probs[:, 2:] == 0).all()
    assert set(drawn.ids.tolist()) == {0, 1}


def test_greedy_and_coupled_drafts_are_the_choices_that_the_target_would_make():
    rows, vocab_size = 50, 3000
    logits = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(1)) * 3
    seed, position = torch.arange(rows) - 25, torch.arange(rows) + 7
    for mode in (Mode.GREEDY, Mode.COUPLED):
        sampling = uniform(mode, seed, position, temperature=0.8)
        none = torch.zeros(rows, dtype=torch.int64)
        chosen = torch_kernel.verify(build(logits, none, none[:0], sampling)).token_ids[:, 0]
        drawn = sample_drafts(logits, mode, plain_constraints(rows, 0.8), seed, position, position - 3)
        assert drawn.q_ids is None
        assert torch.equal(drawn.ids, chosen.to(torch.int64))


def random_subset(seed, vocab_size, size, rows):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randperm(vocab_size, generator=generator)[:size]
    return ids, torch.randn(rows, size, generator=generator) * 3


@pytest.mark.parametrize(("vocab_size", "size"), [(5000, 1500), (5000, 1024), (5000, 5000), (40, 7), (300, 257)])
@pytest.mark.parametrize("constraints", [{}, {"top_k": 3}, {"top_p": 0.9}])
def test_coupled_ranking_is_that_of_all_noisy_scores(vocab_size, size, constraints):
    rows, alternatives = 40, 3
    ids, logits = random_subset(size, vocab_size, size, rows)
    seed, position = torch.arange(rows) - 25, torch.arange(rows) + 7
    c = plain_constraints(rows, 0.8, **constraints)
    noise = torch.stack([gumbel(s.expand(size), p.expand(size), ids) for s, p in zip(seed, position, strict=True)])
    log_p = constrain_logits(logits, c)
    scores, columns = (log_p + noise).topk(alternatives + 1)
    expected = torch.where(scores > -math.inf, ids[columns], -1)
    probs = log_p.softmax(-1).gather(1, columns)
    drawn = sample_drafts(logits, Mode.COUPLED, c, seed, position, position, 8, TokenSubset(ids), alternatives)
    assert torch.equal(torch.cat([drawn.ids.unsqueeze(1), drawn.alternatives], dim=1), expected)
    torch.testing.assert_close(drawn.confidence, probs)


@pytest.mark.parametrize("cut", [False, True])
def test_a_device_without_a_coupled_kernel_has_the_cpu_s_ranking(cut):
    ids, logits = random_subset(1, 5000, 1500, 10)
    parts = logits, torch.full((10,), 0.8), torch.full((10,), 0.5), logits.amax(-1), torch.arange(10), torch.arange(10)
    expected = coupled_ranking(*parts, 3, subset=TokenSubset(ids) if cut else None)
    with CountingDevice():
        subset = TokenSubset(ids.to(DEVICE)) if cut else None
        found = coupled_ranking(*(part.to(DEVICE) for part in parts), 3, subset=subset)
        assert all(part.device == DEVICE for part in found)
        assert [part.tolist() for part in found] == [part.tolist() for part in expected]


@pytest.mark.parametrize("alternatives", [0, 1, 3])
@pytest.mark.parametrize(("size", "step"), [(1500, 0.0), (1500, 0.5), (128, 1.0), (7, 0.5), (2, 1.0)])
@pytest.mark.parametrize("cut", [False, True])
def test_greedy_rows_are_the_lowest_of_the_likeliest_and_name_those_after_it(size, step, cut, alternatives):
    ids, logits = random_subset(size, 2 * size, size, 30)
    if step:
        logits = (logits / step).round() * step  # equals, among the likeliest, too
    logits[3, 1:] = -math.inf
    tokens = ids if cut else torch.arange(size)
    found = greedy_choice(logits, TokenSubset(ids) if cut else None, alternatives)
    for row, drawn in enumerate(found.ids.tolist()):
        assert drawn == min(tokens[logits[row] == logits[row].amax()].tolist())
    if not alternatives:
        assert found.alternatives is None
        return
    columns = torch.empty(2 * size, dtype=torch.int64)
    columns[tokens] = torch.arange(size)
    for row, others in enumerate(found.alternatives.tolist()):
        named = [other for other in others if other >= 0]
        assert found.ids[row] not in named
        assert len({*named}) == len(named) == min(alternatives, int(logits[row].isfinite().sum()) - 1)
        probs = logits[row].softmax(-1)
        of_named = probs[columns[torch.tensor(named, dtype=torch.int64)]]
        torch.testing.assert_close(of_named, found.confidence[row, 1 : 1 + len(named)])
        torch.testing.assert_close(of_named, probs.topk(1 + len(named)).values[1:])


@pytest.mark.parametrize("alternatives", [0, 2])
def test_rows_without_a_finite_maximum_say_so_in_every_mode(alternatives):
    logits = torch.zeros(4, 600)
    logits[0, 5], logits[1], logits[2, 7] = math.nan, -math.inf, math.inf
    where = torch.arange(4), torch.arange(4), torch.arange(4)
    found = [sample_drafts(logits, mode, plain_constraints(4), *where, 8, None, alternatives) for mode in Mode]
    for sample in found:
        assert sample.usable.tolist() == [False, False, False, True]


def test_coupled_drafts_from_a_subset_are_the_targets_own_tokens_where_it_chooses_among_them():
    ids, logits = random_subset(3, 3000, 900, 50)
    full = torch.full((50, 3000), -math.inf)
    full[:, ids] = logits
    seed, position = torch.arange(50), torch.arange(50) + 7
    sampling = uniform(Mode.COUPLED, seed, position, temperature=0.8)
    none = torch.zeros(50, dtype=torch.int64)
    chosen = torch_kernel.verify(build(full, none, none[:0], sampling)).token_ids[:, 0]
    drawn = sample_drafts(
        logits, Mode.COUPLED, plain_constraints(50, 0.8), seed, position, position, subset=TokenSubset(ids)
    )
    assert torch.equal(drawn.ids, chosen.to(torch.int64))


@pytest.mark.parametrize("n", [1, 3, 11, 64])
def test_the_likeliest_by_tiles_are_those_of_topk(n):
    _, logits = random_subset(n, 4096, 4096, 5)
    logits[1, 5:9] = 50.0
    logits[2] = -math.inf
    logits[2, 77] = 1.0
    values, ids = top_n(logits, n, search_maxima(logits))
    assert torch.equal(values, logits.topk(n).values)
    assert torch.equal(logits.gather(1, ids), values)
    assert all(len(set(row)) == n for row in ids.tolist())
