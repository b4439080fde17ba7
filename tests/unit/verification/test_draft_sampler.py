import torch

from actors.verification import torch_kernel
from actors.verification.batch import Sampling, VerificationBatch
from actors.verification.draft_sampler import sample_drafts
from actors.verification.interface import choose
from actors.verification.mode import Mode
from tests.unit.verification.toy_target import plain_constraints


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
        sampling = Sampling.uniform(mode, seed, position, temperature=0.8)
        none = torch.zeros(rows, dtype=torch.int64)
        chosen = torch_kernel.verify(VerificationBatch.build(logits, none, none[:0], sampling)).token_ids[:, 0]
        drawn = sample_drafts(logits, mode, plain_constraints(rows, 0.8), seed, position, position - 3)
        assert drawn.q_ids is None
        assert torch.equal(drawn.ids, chosen.to(torch.int64))


def test_no_rows():
    none = torch.zeros(0, dtype=torch.int64)
    for mode in Mode:
        assert sample_drafts(torch.zeros(0, 9), mode, plain_constraints(0), none, none, none).ids.shape == (0,)


def test_the_cpu_gets_torch():
    assert choose("cpu") is torch_kernel.verify
