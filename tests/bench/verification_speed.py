"""Compares the speed of verification with that of vLLM's rejection sampler, on the same logits and drafts.

    python -m tests.bench.verification_speed --repeats 5

Both sides take the target's logits after the model and give committed tokens, in inference mode as in vLLM's model
runner; the two alternate, take turns in being first, and each gets a fresh copy of the logits outside the clock. vLLM's
side is all of `RejectionSampler.forward`, bonus token and sampling constraints included. Building our batch is inside
the clock, building vLLM's metadata is not. In `greedy` the tokens of both are compared.

Modes: `greedy`; `rejection` and `block` with a top-64 q, against vLLM with the same q as dense probabilities (built
outside the clock); `one-hot`, without a q on both sides; `coupled`, against vLLM's sampling without a q and without
seeds, for it has no coupled mode; `top-p`, rejection with the sparse q, temperature 0.7, top_p 0.95.

`floor` is reading the logits once at the memory bandwidth measured here by a large copy; `of floor` is how much of that
bandwidth our side's one reading reaches.
"""

from __future__ import annotations

import argparse
import math
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outrider.actors.verification.dispatch import kernel_for
from outrider.cluster.modes import Mode
from tests.unit.verification.arrays import build, uniform

N = 64


@dataclass(frozen=True)
class Case:
    name: str
    mode: Mode
    with_q: bool = False
    temperature: float = 1.0
    top_p: float = 1.0


CASES = [
    Case("greedy", Mode.GREEDY),
    Case("one-hot", Mode.REJECTION),
    Case("rejection", Mode.REJECTION, with_q=True),
    Case("block", Mode.BLOCK, with_q=True),
    Case("coupled", Mode.COUPLED),
    Case("top-p", Mode.REJECTION, with_q=True, temperature=0.7, top_p=0.95),
]


@dataclass(frozen=True)
class Inputs:
    """B requests of K drafts each. q agrees with p on the whole, so most drafts are accepted."""

    logits: Tensor
    draft_ids: Tensor
    q_ids: Tensor
    q_probs: Tensor

    @classmethod
    def random(cls, B: int, K: int, V: int, device: str, seed: int = 0) -> Inputs:
        generator = torch.Generator().manual_seed(seed)
        # A peak of 64 likely tokens over a wide tail, as language models give.
        logits = torch.randn(B * (K + 1), V, generator=generator) * 2.5
        rows = torch.arange(B * (K + 1)).view(B, K + 1)[:, :K].flatten()
        top = logits[rows].topk(N, dim=-1)
        logits[rows.unsqueeze(1), top.indices] += 6
        q_probs = (top.values + 0.5 * torch.randn(B * K, N, generator=generator)).softmax(-1)
        draft_ids = top.indices.gather(1, torch.multinomial(q_probs, 1, generator=generator)).squeeze(1)
        return cls(*(part.to(device) for part in (logits, draft_ids, top.indices, q_probs)))


def our_side(case: Case, inputs: Inputs, B: int, K: int) -> Callable[[Tensor], Tensor]:
    verify = kernel_for(inputs.logits.device)
    num_drafts = torch.full((B,), K)
    seed, position = torch.arange(B), torch.full((B,), 100)
    sampling = uniform(case.mode, seed, position, case.temperature, top_p=case.top_p)
    q = (inputs.q_ids, inputs.q_probs) if case.with_q else (None, None)

    def run(logits: Tensor) -> Tensor:
        return verify(build(logits, num_drafts, inputs.draft_ids, sampling, *q)).token_ids

    return run


def vllm_side(case: Case, inputs: Inputs, B: int, K: int) -> Callable[[Tensor], Tensor]:
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.rejection_sampler import RejectionSampler
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    device = inputs.logits.device
    greedy = case.mode is Mode.GREEDY
    sampling = SamplingMetadata(
        temperature=None if greedy else torch.full((B,), case.temperature, device=device),
        all_greedy=greedy,
        all_random=not greedy,
        top_p=torch.full((B,), case.top_p, device=device) if case.top_p < 1 else None,
        top_k=None,
        generators={},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=torch.zeros(B, device=device),
        presence_penalties=torch.zeros(B, device=device),
        repetition_penalties=torch.ones(B, device=device),
        output_token_ids=[[] for _ in range(B)],
        spec_token_ids=[[] for _ in range(B)],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )
    # As the model runner's _calc_spec_decode_metadata; make_dummy's indices are all 0, so only one row would be read.
    rows = np.arange(B * (K + 1), dtype=np.int32).reshape(B, K + 1)
    ends = np.arange(1, B + 1, dtype=np.int32)
    indices = [ends * K, ends * (K + 1), rows[:, :K].flatten(), rows[:, K].copy(), rows.flatten()]
    drafts = SpecDecodeMetadata(
        inputs.draft_ids.to(torch.int32), [K] * B, *(torch.from_numpy(index).to(device) for index in indices)
    )
    dense = None
    if case.with_q:
        dense = torch.zeros(B * K, inputs.logits.shape[1], device=device).scatter_(1, inputs.q_ids, inputs.q_probs)
    sampler = RejectionSampler(Sampler())
    return lambda logits: sampler(drafts, dense, logits, sampling).sampled_token_ids


def bandwidth(device: str) -> float:
    """Bytes a second that a copy reads and writes, the best of five."""
    source = torch.empty(1 << 26, device=device)
    target = torch.empty_like(source)
    seconds = min(timed(lambda: target.copy_(source), device) for _ in range(5))
    return 2 * source.nbytes / seconds


def timed(run: Callable[[], object], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def compare(case: Case, inputs: Inputs, B: int, K: int, repeats: int, device: str, ours_only: bool) -> list[float]:
    """Median seconds, ours and, unless ours_only, vLLM's, alternating; one unclocked run of each first."""
    sides = [our_side(case, inputs, B, K)]
    if not ours_only:
        sides.append(vllm_side(case, inputs, B, K))
        if case.mode is Mode.GREEDY:
            ours, theirs = (run(inputs.logits.clone()) for run in sides)
            assert torch.equal(ours, theirs), "greedy tokens differ"
    seconds: list[list[float]] = [[] for _ in sides]
    for repeat in range(repeats + 1):
        for side in range(len(sides)) if repeat % 2 else reversed(range(len(sides))):
            logits = inputs.logits.clone()
            taken = timed(lambda run=sides[side], logits=logits: run(logits), device)  # type: ignore[misc]
            if repeat:
                seconds[side].append(taken)
    return [statistics.median(of_side) for of_side in seconds]


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description="Verification against vLLM's rejection sampler.")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--drafts", type=int, nargs="+", default=[3, 7])
    parser.add_argument("--vocab", type=int, nargs="+", default=[49152, 151936])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--ours-only", action="store_true", help="without vLLM, which need not be installed then")
    arguments = parser.parse_args()
    device = arguments.device
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    if device == "cpu" and not arguments.ours_only:
        # vLLM's kernels for machines without a Triton backend. It must happen before they are imported.
        from vllm.platforms import current_platform

        current_platform.register_triton_kernel_overrides()
    speed = bandwidth(device)
    where = torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()}, {arguments.threads} thread(s)"
    print(f"{where}; torch {torch.__version__}; copy bandwidth {speed / 1e9:.1f} GB/s; seed 0; medians, alternating")
    print("mode         B  K       V      MB  ours ms  vLLM ms vLLM/ours of floor")
    for V in arguments.vocab:
        for B in arguments.requests:
            for K in arguments.drafts:
                inputs = Inputs.random(B, K, V, device)
                moved = inputs.logits.nbytes
                for case in CASES:
                    ours, *others = compare(case, inputs, B, K, arguments.repeats, device, arguments.ours_only)
                    theirs = others[0] if others else math.nan
                    print(
                        f"{case.name:10} {B:3} {K:2} {V:7} {moved / 1e6:7.1f} {ours * 1e3:8.3f} {theirs * 1e3:8.3f} "
                        f"{theirs / ours:9.2f} {moved / speed / ours:8.1%}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
