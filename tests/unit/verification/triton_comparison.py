"""Run by test_triton.py in a process of its own, with TRITON_INTERPRET=1 set before Triton is imported; and on a GPU
by tests/gpu, compiled.

Compares the two implementations on random batches of mixed modes: committed tokens, accepted lengths and status.
Before them Philox, word by word.
"""

from __future__ import annotations

import math
import sys

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.actors.verification import coupled, torch_draws, torch_kernel, triton_draws, triton_kernel, triton_top_p
from outrider.actors.verification import noise as philox
from outrider.actors.verification import triton_kernel as triton_noise
from outrider.actors.verification.batch import VerificationBatch
from outrider.actors.verification.noise import Role
from outrider.actors.verification.search import TokenSubset
from tests.unit.verification.arrays import build, sampling_of

REQUESTS, N = 10, 5


Device = torch.device | str


def random_batch(
    seed: int, vocab_size: int, with_q: bool, constrained: bool, damaged: bool, device: Device
) -> VerificationBatch:
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    num_drafts = integers(0, 4, REQUESTS)
    drafts = int(num_drafts.sum())
    n = min(N, vocab_size)
    q_ids = torch.rand(drafts, vocab_size, generator=generator).argsort(-1)[:, :n]
    q_logits = torch.randn(drafts, n, generator=generator)
    q_probs = q_logits.softmax(-1)
    draft_ids = q_ids.gather(1, torch.multinomial(q_probs, 1, generator=generator)).squeeze(1)
    # The target mostly agrees with the drafter, so that there are accepted drafts of every length.
    logits = torch.randn(drafts + REQUESTS, vocab_size, generator=generator) * 2
    draft_row = (torch.arange(REQUESTS).repeat_interleave(num_drafts) + torch.arange(drafts)).unsqueeze(1)
    logits[draft_row, q_ids] += 9 + q_logits + 0.5 * torch.randn(drafts, n, generator=generator)
    if damaged:
        draft_ids[integers(0, drafts, 2)] = torch.tensor([-7, vocab_size])
        q_probs[integers(0, drafts, 1), 0] = math.nan
        q_ids[integers(0, drafts, 1), 1] = vocab_size + 1
        logits[integers(0, len(logits), 1), 2] = math.nan
        logits[integers(0, len(logits), 1)] = -math.inf
    sampling = sampling_of(
        mode=integers(0, 4, REQUESTS),
        temperature=torch.rand(REQUESTS, generator=generator) + 0.5,
        top_k=integers(0, 2, REQUESTS) * 20 if constrained else torch.zeros(REQUESTS),
        top_p=1 - 0.1 * integers(0, 2, REQUESTS) if constrained else torch.ones(REQUESTS),
        min_p=torch.zeros(REQUESTS),
        seed=integers(-(2**62), 2**62, REQUESTS),
        position=integers(0, 10_000, REQUESTS),
    )
    q = (q_ids.to(device), q_probs.to(device)) if with_q else (None, None)
    return build(logits.to(device), num_drafts, draft_ids.to(device), sampling, *q)


@triton.jit
def store_words(out, seed, block, position, role: tl.constexpr, round_start, TILE: tl.constexpr):
    """uint32 [4, TILE] at out: the words of TILE blocks from `block` on."""
    lane = tl.arange(0, TILE)
    w0, w1, w2, w3 = triton_noise.philox_words(tl.load(seed), (block + lane).to(tl.uint32), position, role, round_start)
    for word in tl.static_range(4):
        tl.store(out + word * TILE + lane, w0 if word == 0 else w1 if word == 1 else w2 if word == 2 else w3)


def compare_words(device: Device, tile: int = 16) -> int:
    """Every word of Philox, at the ends of each argument's range too. Returns how many words differ."""
    different = 0
    counters = [
        (0, 0, 0, Role.ACCEPT),
        (1, 131_071, 131_072, Role.RESIDUAL),
        (2**31 - tile // 2, 2**31 - 1, 1, Role.COUPLED),
        (2**32 - tile, 7, 2**31 - 1, Role.COUPLED_FINE),
    ]
    for seed in (0, -1, 2**63 - 1, -(2**63), 0x299F31D0A4093822):
        for block, position, round_start, role in counters:
            out = torch.zeros(4, tile, dtype=torch.uint32, device=device)
            key = torch.tensor([seed])
            store_words[(1,)](out, key.to(device), block, position, int(role), round_start, tile)
            expected = philox.words(key, role, torch.tensor([position]), block + torch.arange(tile), round_start)
            different += int((torch.stack(expected) != out.to(torch.int64).cpu()).sum())
    return different


def compare_choices(device: Device) -> int:
    """The drafter's own coupled choice, among all tokens and among some. Returns how many rows chose differently."""
    different = 0
    for vocab_size, top_p in ((1500, 1.0), (1500, 0.9), (1024, 0.9), (40, 1.0)):
        generator = torch.Generator().manual_seed(vocab_size)
        logits = torch.randn(12, vocab_size, generator=generator) * 2
        temperature = torch.rand(12, generator=generator) + 0.5
        seed = torch.randint(-(2**62), 2**62, (12,), generator=generator)
        position = torch.randint(0, 10_000, (12,), generator=generator)
        row_max = logits.amax(-1)
        threshold = None if top_p == 1.0 else row_max - 4.0
        expected = coupled.coupled_ranking(logits, temperature, threshold, row_max, seed, position)[0].squeeze(1)
        there = [None if part is None else part.to(device) for part in (logits, temperature, threshold, seed, position)]
        found = triton_draws.coupled_choice(*there)
        different += int((expected != found.cpu()).sum())
        ids = torch.randperm(3 * vocab_size, generator=generator)[:vocab_size]
        expected = coupled.coupled_ranking(
            logits, temperature, threshold, row_max, seed, position, subset=TokenSubset(ids)
        )[0].squeeze(1)
        found = triton_draws.coupled_choice(*there, ids.to(device))
        different += int((expected != found.cpu()).sum())
    return different


def compare_draws(device: Device) -> int:
    """The drafter's own draws from the n likeliest tokens, q and alternatives, rows without a distribution among them.
    Returns how many rows differ: an id, or a probability by more than 1e-6."""
    different = 0
    rows = 10 if torch.device(device).type == "cpu" else 1000
    for n, alternatives in ((1, 0), (5, 2), (64, 0), (20, 3), (3, 5), (128, 1)):
        generator = torch.Generator().manual_seed(n)
        values = (torch.randn(rows, n, generator=generator) * 3).sort(-1, descending=True).values
        values[3:6, 1:] = -math.inf
        values[6], values[7, 0], values[8, 0] = -math.inf, math.nan, math.inf
        ids = torch.rand(rows, n, generator=generator).argsort(-1) * 1000
        temperature = torch.rand(rows, generator=generator) + 0.1
        seed = torch.randint(-(2**62), 2**62, (rows,), generator=generator)
        position = torch.randint(0, 10_000, (rows,), generator=generator)
        for threshold in (None, values[:, 0] - 3.0):
            arguments = (values, ids, temperature, threshold, seed, position, position - position % 3)
            expected = torch_draws.draft_choice(*arguments, alternatives)
            there = [None if part is None else part.to(device) for part in arguments]
            found = triton_draws.draft_choice(*there, alternatives)
            wrong = expected.usable != found.usable.cpu()
            for name in ("ids", "q_ids", "q_probs", "alternatives", "confidence"):
                here, its = getattr(expected, name), getattr(found, name)
                assert (here is None) == (its is None)
                if here is not None:
                    near = (here - its.cpu()).abs() <= (1e-6 if here.is_floating_point() else 0)
                    wrong |= expected.usable & ~near.view(rows, -1).all(-1)
            different += int(wrong.sum())
    return different


def threshold_by_order(logits: Tensor, weights: Tensor, aim: Tensor) -> Tensor:
    """What `triton_top_p.nucleus` finds, by sorting the row."""
    ordered, order = logits.sort(dim=-1, descending=True)
    ordered_weights = weights.gather(1, order).to(torch.float64)
    before = ordered_weights.cumsum(-1) - ordered_weights
    last = ((before < aim.unsqueeze(1)) & (ordered_weights > 0)).sum(-1, keepdim=True) - 1
    return ordered.gather(1, last.clamp_min(0)).squeeze(1)


def rows_to_cut(rows: int, vocab_size: int, generator: torch.Generator) -> Tensor:
    """Rows of logits: flat and peaked, full of ties, around zero of both signs, far from it, with tokens forbidden."""
    spread = torch.tensor([0.0, 1e-3, 0.5, 4.0, 40.0, 1e4])[torch.randint(6, (rows, 1), generator=generator)]
    shift = torch.tensor([0.0, -300.0, 50.0, 1e6])[torch.randint(4, (rows, 1), generator=generator)]
    logits = torch.randn(rows, vocab_size, generator=generator) * spread + shift
    coarse = torch.rand(rows, 1, generator=generator) < 0.5
    logits = torch.where(coarse, logits.bfloat16().float(), logits)
    logits[torch.rand(rows, vocab_size, generator=generator) < 0.1] = -math.inf
    logits[torch.rand(rows, vocab_size, generator=generator) < 0.05] = 0.0
    logits[:, 0] = torch.where(torch.rand(rows, generator=generator) < 0.3, -0.0, logits[:, 0])
    logits[:, -1] = logits[:, -1].clamp_min(-1e30)  # one token at least may come
    return logits


def compare_nucleus(device: Device, rows: int = 1000) -> int:
    """top_p's threshold. Returns how many rows keep other tokens than ordering them does."""
    different = 0
    at_once = 1024 if torch.device(device).type == "cpu" else 1
    for vocab_size in (2, 7, 100, 1500):
        generator = torch.Generator().manual_seed(vocab_size)
        count = rows if vocab_size <= triton_top_p.TILE else rows // 10
        logits = rows_to_cut(count, vocab_size, generator)
        temperature = torch.rand(count, 1, generator=generator) + 0.1
        floor = torch.where(torch.rand(count, 1, generator=generator) < 0.3, logits.median(-1, True).values, -math.inf)
        weights = ((logits - logits.amax(-1, keepdim=True)) / temperature).exp().masked_fill(logits < floor, 0.0)
        top_p = torch.tensor([1e-6, 0.1, 0.5, 0.9, 0.999, 1 - 2**-24])[torch.randint(6, (count,), generator=generator)]
        aim = top_p * weights.sum(-1, dtype=torch.float64)
        # Where tokens hold the aim exactly, none is kept beyond them.
        weights[: count // 4], aim[: count // 4] = 1.0, torch.randint(1, vocab_size + 1, (count // 4,)).double()
        expected = threshold_by_order(logits, weights, aim)
        found = triton_top_p.nucleus(logits.to(device), weights.to(device), aim.to(device), at_once).cpu()
        kept = (logits >= expected.unsqueeze(1)) == (logits >= found.unsqueeze(1))
        different += int((~kept.all(-1)).sum())
    return different


def main(device: Device = "cpu") -> int:
    if different := compare_words(device):
        print(f"{different} words of Philox differ")
        return 1
    if different := compare_choices(device):
        print(f"{different} coupled choices of the drafter differ")
        return 1
    if different := compare_draws(device):
        print(f"{different} of the drafter's draws from q differ")
        return 1
    if different := compare_nucleus(device):
        print(f"{different} rows keep other tokens for top_p than ordering them does")
        return 1
    compared = accepted = 0
    for seed, (vocab_size, with_q, constrained, damaged) in enumerate(
        [
            (1500, True, False, False),
            (1100, True, True, False),
            (40, False, True, False),
            (1100, False, False, True),
            (1024, True, False, True),
            (300, True, True, True),
            (5, True, False, False),
        ]
    ):
        # torch's coupled choice is the CPU's alone, whatever the device under test.
        batch, there = (random_batch(seed, vocab_size, with_q, constrained, damaged, on) for on in ("cpu", device))
        expected, found = torch_kernel.verify(batch), triton_kernel.verify(there)
        for name, value in vars(expected).items():
            if not torch.equal(value, getattr(found, name).cpu()):
                print(f"batch {seed}: {name}\ntorch  {value.tolist()}\nTriton {getattr(found, name).tolist()}")
                print(f"modes {batch.mode.tolist()}")
                return 1
        compared += REQUESTS
        accepted += int((expected.token_ids[:, 1:] >= 0).sum())
    print(f"{compared} requests alike, {accepted} drafts accepted")
    return 0


if __name__ == "__main__":
    sys.exit(main())
