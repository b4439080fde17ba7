"""vLLM by itself, plain or with its in-process draft_model, under a closed loop. A process of its own for each engine.

The engine runs in this process, scheduler, worker and all, without sockets: the least host work that vLLM offers for
offline requests. Nothing here serves; the other side pays for that.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outrider.cluster.placement import available_cores, thread_environment
from tests.bench.emulation import plugin
from tests.bench.emulation.load import ClosedLoop, Load, prompt
from tests.bench.emulation.progress import FullRounds

MAX_MODEL_LEN = 2048
KV_CACHE_BYTES = 128 << 20
_LOOK_EVERY_S = 1.0


@dataclass(frozen=True)
class Job:
    """One engine and the loads it is to carry, one after another. traces: where its models write."""

    target: str
    drafter: str | None
    k: int
    loads: list[Load]
    traces: str
    one_pass: bool = False
    """vLLM's parallel_drafting: the drafter drafts all tokens in one pass."""


@dataclass(frozen=True)
class Answered:
    """One load's end. started_s, ended_s: of time.perf_counter. tokens: that all its requests got."""

    started_s: float
    ended_s: float
    tokens: int


def run(job: Job, directory: Path, log: Path) -> list[Answered]:
    """Start an engine, carry the loads, end it. What it writes to stderr goes to log. Raises CalledProcessError.

    directory: to run in, see `plugin.environment`.
    """
    environment = {
        **os.environ,
        **thread_environment(available_cores()),
        **plugin.environment(directory / "plugin"),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    command = [sys.executable, "-m", __name__, json.dumps(asdict(job))]
    with log.open("w") as errors:
        done = subprocess.run(
            command, env=environment, cwd=directory, stdout=subprocess.PIPE, stderr=errors, text=True, check=True
        )
    return [Answered(**row) for row in json.loads(done.stdout.splitlines()[-1])]


def carry(engine: Any, load: Load, is_enough: Callable[[], bool], first_index: int = 0) -> Answered:
    """Raises RuntimeError when a request did not get all tokens it asked for."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=load.temperature, max_tokens=load.max_tokens, ignore_eos=True)
    loop = ClosedLoop(load, is_enough, first_index)
    tokens = 0
    started = time.perf_counter()
    for index in loop.first():
        engine.add_request(str(index), prompt(index), params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            if not output.finished:
                continue
            tokens += len(output.outputs[0].token_ids)
            if (following := loop.after_one_ended()) is not None:
                engine.add_request(str(following), prompt(following), params)
    if tokens != loop.tokens:
        raise RuntimeError(f"{tokens} of {loop.tokens} tokens ran")
    return Answered(started, time.perf_counter(), tokens)


def keep_asynchronous() -> None:
    """vLLM's CPU platform clears what its configuration has chosen for a GPU, and takes a process more for the worker;
    the emulated device is one."""
    from vllm.platforms.cpu import CpuPlatform

    stock = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        scheduler, parallel = vllm_config.scheduler_config, vllm_config.parallel_config
        chosen = scheduler.async_scheduling, parallel.distributed_executor_backend
        stock(cls, vllm_config)
        scheduler.async_scheduling, parallel.distributed_executor_backend = chosen

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)  # type: ignore[assignment,method-assign]


def main() -> None:
    from vllm import LLM

    document = json.loads(sys.argv[1])
    keep_asynchronous()
    loads = [Load(**load) for load in document["loads"]]
    speculative: dict[str, Any] = {}
    if document["k"]:
        speculative = {
            "speculative_config": {
                "method": "draft_model",
                "model": document["drafter"],
                "num_speculative_tokens": document["k"],
                "parallel_drafting": document["one_pass"],
            },
        }
    made = LLM(
        document["target"],
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        kv_cache_memory_bytes=KV_CACHE_BYTES,
        max_num_seqs=max(load.batch for load in loads),
        enforce_eager=True,
        distributed_executor_backend="uni",
        **speculative,
    )
    engine = made.llm_engine
    if not engine.vllm_config.scheduler_config.async_scheduling:
        raise RuntimeError("vLLM does not schedule as it does on a GPU by default")
    carry(engine, Load(loads[0].batch, 0, 8), lambda: True, first_index=900_000)
    answered = []
    for load in loads:
        rounds = FullRounds(Path(document["traces"]), load, _LOOK_EVERY_S)
        answered.append(asdict(carry(engine, load, rounds.are_enough)))
    print("\n" + json.dumps(answered), flush=True)


if __name__ == "__main__":
    main()
