"""Verification on the device: the Triton kernels, compiled, against the torch ones on the CPU."""

import importlib.util

import pytest
import torch

from outrider.actors.verification import noise, torch_kernel
from outrider.actors.verification.dispatch import kernel_for
from outrider.actors.verification.noise import Role
from outrider.cluster.modes import Mode
from tests.unit.verification.arrays import build, uniform
from tests.unit.verification.toy_target import Rounds, Toy, p_value

MODES = [Mode.GREEDY, Mode.REJECTION, Mode.BLOCK, Mode.COUPLED]
SAMPLES = 200_000


def batch_of(mode, requests, drafts, vocab_size, device, top_p=1.0, seed=0):
    """The target mostly agrees with the drafter, so that there are accepted drafts of every length."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(requests * (drafts + 1), vocab_size, generator=generator) * 2.5
    rows = torch.arange(len(logits)).view(requests, drafts + 1)[:, :drafts].flatten()
    top = logits[rows].topk(min(64, vocab_size), dim=-1)
    logits[rows[:, None], top.indices] += 6
    q = (top.values + 0.5 * torch.randn(top.values.shape, generator=generator)).softmax(-1)
    ids = top.indices.gather(1, torch.multinomial(q, 1, generator=generator)).squeeze(1) if len(q) else rows
    sampling = uniform(mode, torch.arange(requests) + 7, torch.full((requests,), 40), 0.8, top_p=top_p)
    sent = (None, None) if mode in (Mode.GREEDY, Mode.COUPLED) else (top.indices.to(device), q.to(device))
    return build(logits.to(device), torch.full((requests,), drafts), ids.to(device), sampling, *sent)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_mixed_and_damaged_batches_philox_and_the_drafters_choices_are_as_in_torch(gpu):
    from tests.unit.verification import triton_comparison

    assert triton_comparison.main(gpu) == 0


@pytest.mark.parametrize("top_p", [1.0, 0.9])
@pytest.mark.parametrize(
    ("requests", "drafts", "vocab_size"), [(1, 0, 49152), (1, 4, 151936), (8, 3, 152064), (32, 8, 32000)]
)
@pytest.mark.parametrize("mode", MODES)
def test_tokens_are_those_of_the_cpu(device, mode, requests, drafts, vocab_size, top_p):
    found = kernel_for(device)(batch_of(mode, requests, drafts, vocab_size, device, top_p=top_p))
    expected = torch_kernel.verify(batch_of(mode, requests, drafts, vocab_size, "cpu", top_p=top_p))
    for name, value in vars(expected).items():
        assert torch.equal(value, getattr(found, name).cpu()), name


@pytest.mark.parametrize("mode", [Mode.REJECTION, Mode.BLOCK, Mode.COUPLED])
def test_committed_tokens_are_distributed_as_plain_sampling_gives_them(device, mode):
    target, drafter = Toy.random(1), Toy.random(3)
    rounds = Rounds(target, drafter, mode, kernel_for(device), real_sampler=True, device=device)
    samples = SAMPLES if device.type == "cuda" else SAMPLES // 10
    assert p_value(rounds.run(torch.arange(samples)), target.joint()) > 1e-6


def test_noise_is_bit_for_bit_that_of_the_cpu(device):
    seed = torch.tensor([0, -1, 2**63 - 1, -(2**63), 0x299F31D0A4093822])
    position, block = torch.tensor([0, 1, 7, 2**31 - 1, 40]), torch.arange(1000)
    for role in Role:
        arguments = seed[:, None], role, position[:, None], block, 3
        here = noise.words(*arguments)
        there = noise.words(*(part.to(device) if isinstance(part, torch.Tensor) else part for part in arguments))
        assert all(torch.equal(a, b.cpu()) for a, b in zip(here, there, strict=True))


@pytest.mark.parametrize("top_p", [1.0, 0.9])
@pytest.mark.parametrize("mode", MODES)
def test_nothing_waits_for_the_gpu_between_logits_and_tokens(gpu, mode, top_p):
    batch = batch_of(mode, 4, 4, 49152, gpu, top_p=top_p)
    verify = kernel_for(gpu)
    verify(batch)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        verify(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
