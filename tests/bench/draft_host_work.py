"""What a step of the drafter takes beside its forward pass, on this machine's host.

    python -m tests.bench.draft_host_work --step-ms 24
    python -m tests.bench.draft_host_work --step-ms 0.3

The drafter's own loop, planner and engine around an emulated draft model whose device takes --step-ms. One sequence,
whose target is played by this process: it takes the drafts, waits as long as a verification would, and commits what the
text has. Prints where the host's time goes, in milliseconds, but for the wait for the device: what lies between launch
and read runs beside the device. With long steps on a core that has slept, with short ones on one with warm caches.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.bench.emulation import plugin

K = 3
STEPS_UNDER_A_VERIFICATION = 4.2
PROMPT = list(b"what the drafter does between two steps")


class Marks:
    """When named pieces of the drafter's work began and ended, as its one loop thread passed by."""

    def __init__(self) -> None:
        self.times: list[tuple[float, str]] = []

    def around(self, owner: Any, method: str, name: str) -> None:
        """Mark every call of owner.method from now on."""
        inner: Callable[..., Any] = getattr(owner, method)

        def marked(*args: Any, **kwargs: Any) -> Any:
            self.times.append((time.perf_counter(), f"{name} begins"))
            result = inner(*args, **kwargs)
            self.times.append((time.perf_counter(), f"{name} ends"))
            return result

        setattr(owner, method, marked)

    def pieces(self, skip: float = 0.25) -> dict[tuple[str, str], list[float]]:
        """Milliseconds from each mark to the next. skip: the share at the start that is left out."""
        kept = self.times[int(len(self.times) * skip) :]
        found: dict[tuple[str, str], list[float]] = {}
        for (since, before), (until, after) in itertools.pairwise(kept):
            found.setdefault((before, after), []).append((until - since) * 1e3)
        return found


class Target:
    """Plays the target: its text, and commits in time."""

    def __init__(self, loop: Any, verification_s: float, vocab_size: int) -> None:
        from tests.bench.emulation.checkpoint import FIRST_WRITTEN_ID
        from tests.bench.emulation.text_process import TokenRange

        self._loop, self._verification_s = loop, verification_s
        self._tokens = TokenRange.of(FIRST_WRITTEN_ID, vocab_size)
        self._answers: list[Any] = []
        self._answered = threading.Event()
        self._text = list(PROMPT)

    def send(self, proposals: Any, work_us: int) -> None:
        """As a link's sink."""
        self._answers += proposals
        self._answered.set()

    def play(self, rounds: int) -> None:
        from outrider.cluster.link.messages import Commit, DraftSampling, Open

        self._loop.attach(1, self)
        self._loop.deliver(1, [Open(0, len(PROMPT), 0, PROMPT, K, DraftSampling())])
        drafts: list[int] = []
        for _ in range(rounds):
            self._answered.wait()
            self._answered.clear()
            drafts = [int(token) for token in self._answers[-1].token_ids]
            time.sleep(self._verification_s)
            base = len(self._text)
            for draft in [*drafts, None]:
                self._text.append(self._next())
                if self._text[-1] != draft:
                    break
            self._loop.deliver(1, [Commit(0, base, self._text[base:], K, K)])

    def _next(self) -> int:
        import torch

        from tests.bench.emulation.text_process import ranked_tokens

        last, position = torch.tensor([self._text[-1]]), torch.tensor([len(self._text) - 1])
        return int(ranked_tokens(last, position, self._tokens, None)[0][0])


def write_drafter(directory: Path, step_ms: float) -> Path:
    from tests.bench.emulation.checkpoint import write_checkpoint
    from tests.bench.emulation.emulation import Emulation
    from tests.bench.emulation.pair import VOCAB_SIZE
    from tests.bench.emulation.step_time import StepTime
    from tests.bench.emulation.text_process import Text, TextProcess

    text = Text.of(TextProcess(acceptance=0.8, second=0.735, third=0.176))
    emulation = Emulation("drafter", StepTime(step_ms, step_ms * 0.005), text)
    return write_checkpoint(directory / "drafter", emulation, vocab_size=VOCAB_SIZE)


def measure(step_ms: float, rounds: int, directory: Path) -> Marks:
    from outrider.actors.drafter.draft_model import DraftModelProposer
    from outrider.actors.drafter.load import load_proposer, warm_up
    from outrider.actors.drafter.loop import DraftLoop
    from outrider.actors.vllm_adapter import draft_worker
    from outrider.actors.vllm_adapter.draft_engine import DraftEngine
    from outrider.actors.vllm_adapter.paged_forward import PagedForward
    from outrider.cluster.config import DraftModelConfig, SpeculationConfig
    from tests.bench.emulation.device import Device
    from tests.bench.emulation.model import EmulatedForCausalLM
    from tests.bench.emulation.pair import VOCAB_SIZE

    config = DraftModelConfig(
        method="draft_model",
        model=str(write_drafter(directory, step_ms)),
        dtype="float32",
        max_model_len=4096,
        kv_cache_memory_bytes=64 << 20,
    )
    proposer = load_proposer(config, SpeculationConfig(num_speculative_tokens=K), None, None)
    warm_up(proposer, SpeculationConfig().draft_top_n)
    marks = Marks()
    for owner, method, name in (
        (EmulatedForCausalLM, "forward", "launch"),
        (Device, "read", "read"),
        (EmulatedForCausalLM, "compute_logits", "logits"),
        (draft_worker, "draw", "draw"),
        (DraftModelProposer, "plan", "plan"),
        (DraftModelProposer, "complete", "results"),
        (DraftEngine, "run", "engine"),
        (PagedForward, "__call__", "inputs"),
    ):
        marks.around(owner, method, name)
    loop = DraftLoop(proposer)
    threading.Thread(target=loop.run, daemon=True).start()
    Target(loop, step_ms * STEPS_UNDER_A_VERIFICATION / 1e3, VOCAB_SIZE).play(rounds)
    loop.stop()
    return marks


def report(marks: Marks) -> str:
    pieces = marks.pieces()
    steps = len(pieces[("read begins", "read ends")])
    lines, total = [], 0.0
    for (before, after), times in pieces.items():
        if len(times) > steps / 2 and before != "read begins":
            total += float(np.median(times))
            lines.append(f"{np.median(times):8.3f} {np.percentile(times, 90):8.3f}  {before} .. {after}")
    return "\n".join(["  median   90th", *lines, f"{total:8.3f}           all, of {steps} steps"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-ms", type=float, default=24.0, help="how long the draft model's forward pass takes")
    parser.add_argument("--rounds", type=int, default=80)
    args = parser.parse_args()
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_USE_V2_MODEL_RUNNER="0", VLLM_LOGGING_LEVEL="ERROR")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="outrider-host-work-") as scratch:
        plugin.install(Path(scratch) / "plugin")
        print(report(measure(args.step_ms, args.rounds, Path(scratch))), flush=True)
    os._exit(0)  # vLLM's threads and the loop's are of no interest any more


if __name__ == "__main__":
    main()
