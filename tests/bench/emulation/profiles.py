"""Lists what is emulated: pairs of models on data-centre accelerators, with their step times and where these come from.

Times are milliseconds of one forward pass with sampling, context up to about a thousand tokens, bfloat16.

The project's stated reference point is 25 ms for a step of a 70B target on four accelerators, 6 ms for one of an 8B
drafter on one, and an acceptance of 0.8. Every other time is arithmetic, not a measurement: the weights an accelerator
reads (2 bytes a parameter) over the 3.35 TB/s of the H100 SXM data sheet, and beyond them what the stated 6 ms holds
(8B: 4.8 ms of reading, 1.2 ms for 32 layers), and 10 us for each all-reduce. For comparison, reported by others:

- Llama 3.3 70B on 4 H100, fp16, vLLM, one request at a time: 25,806 tokens in 493.3 s with 100 prefills of 0.135 s,
  so 18.6 ms a token (vllm issue 12101). 25 ms are nearer to an A100, whose 2.04 TB/s read 35 GB in 17.2 ms.
- Llama 2 7B, 128 tokens in and 20 out: 153.8 ms on one H100 and 107.4 on four, 234.0 and 143.7 ms on A100s (NVIDIA's
  NeMo guide, performance of Llama 2): four accelerators take 0.61 to 0.70 of one's time, not a quarter.
- opt-125m on A100s in vLLM: 0.35 s on one, 1.30 s on two, 1.39 s on four (vllm pull request 4840): sharding makes
  small drafters slower.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tests.bench.emulation.published import PUBLISHED, SECOND, THIRD
from tests.bench.emulation.step_time import StepTime
from tests.bench.emulation.text_process import Text, TextProcess

TEXTS = {
    # The stated acceptance, with the misses covered as they were on HumanEval.
    "stated": Text.of(TextProcess.from_coverage(0.8, (0.66, 0.91, 0.97))),
    # Measured on the Qwen2.5-Coder pair (1.5B and 0.5B), greedy, K = 3: 66, 91 and 97% of HumanEval's rounds were
    # covered with none, one and two alternatives. 0.66 ** (1 / 4) = 0.901, which gives 3.45 tokens a round; 3.42 were
    # measured.
    "code": Text.of(TextProcess.from_coverage(0.66**0.25, (0.66, 0.91, 0.97))),
    # The same pair on harder chat prompts.
    "chat": Text.of(TextProcess.from_coverage(0.52**0.25, (0.52, 0.79, 0.90))),
    # The following are made up, to see what adapts: a text that goes over to another domain and back every 64 tokens,
    # a batch of unlike requests, and a drafter that knows nothing.
    "shift": Text.of(TextProcess(0.9, SECOND, THIRD), TextProcess(0.4, SECOND, THIRD)),
    "mixed": Text.of(*(TextProcess(a, SECOND, THIRD) for a in (0.95, 0.8, 0.5, 0.2)), by="lane"),
    "hopeless": Text.of(TextProcess(0.01, 0.02, 0.02)),
    # For one-pass drafters. One that drafts a token after the other has the first position's acceptance at all.
    **{name: Text.of(published.text()) for name, published in PUBLISHED.items()},
}


@dataclass(frozen=True)
class Profile:
    """A target and a drafter, each with its hardware."""

    name: str
    target: StepTime
    target_accelerators: int
    drafter: StepTime
    """On accelerators of its own."""

    drafter_in_process: StepTime
    """The same drafter sharded over the target's accelerators, the only way vLLM 0.32 runs one in-process."""

    drafter_accelerators: int = 1

    def times(self, factor: float, drafter: float = 1.0) -> Profile:
        """Everything so many times as long, and the drafter beyond that."""
        return replace(
            self,
            target=self.target.times(factor),
            drafter=self.drafter.times(factor * drafter),
            drafter_in_process=self.drafter_in_process.times(factor * drafter),
        )


PROFILES = {
    profile.name: profile
    for profile in (
        # A token more: 141 GFLOP over 4 * 495 TFLOP/s (half the data sheet's dense bfloat16 peak) is 0.07 ms, hidden
        # behind the weights up to some 300 tokens; a sequence more has about 320 MB of KV, 0.024 ms. 0.05 lies between.
        # 8B: 16 GFLOP, 0.03 ms; KV 128 MB, 0.04 ms. In-process at TP 4: 1.2 ms of weights, 1.2 for the layers, 64
        # all-reduces: 3.0. The reported ratios would give 3.7 to 4.2: 3.0 favours vLLM.
        Profile(
            name="70b-8b",
            target=StepTime(25.0, 0.05),
            target_accelerators=4,
            drafter=StepTime(6.0, 0.03),
            drafter_in_process=StepTime(3.0, 0.01),
        ),
        # 1B: 2.5 GB, 0.75 ms, and 16 layers, 0.6 ms. In-process at TP 4: 0.2 + 0.6 + 32 all-reduces.
        Profile(
            name="70b-1b",
            target=StepTime(25.0, 0.05),
            target_accelerators=4,
            drafter=StepTime(1.4, 0.01),
            drafter_in_process=StepTime(1.1, 0.005),
        ),
        # 32B: 33 GB an accelerator, 9.8 ms, 64 layers, 2.4 ms, and 128 all-reduces. A token more: 66 GFLOP over 2 * 495
        # TFLOP/s, 0.07 ms, hidden; a sequence more 256 MB of KV, 0.04 ms.
        # 0.6B: 1.2 GB, 0.4 ms, and 28 layers, 1.05 ms. In-process at TP 2: 0.2 + 1.05 + 56 all-reduces, no gain.
        Profile(
            name="32b-0.6b",
            target=StepTime(13.5, 0.05),
            target_accelerators=2,
            drafter=StepTime(1.5, 0.01),
            drafter_in_process=StepTime(1.8, 0.005),
        ),
    )
}

BATCHES = (1, 8, 32)
"""Concurrent requests the profiles are measured at."""
