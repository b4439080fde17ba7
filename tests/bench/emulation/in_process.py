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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.bench.emulation.load import Load, prompt

MAX_MODEL_LEN = 2048
KV_CACHE_BYTES = 128 << 20


@dataclass(frozen=True)
class Job:
    """One engine and the loads it is to carry, one after another."""

    target: str
    drafter: str | None
    k: int
    loads: list[Load]


@dataclass(frozen=True)
class Answered:
    """One load's end. started_s, ended_s: of time.perf_counter."""

    started_s: float
    ended_s: float
    tokens: int
    acceptance_length: float


def run(job: Job, log: Path) -> list[Answered]:
    """Start an engine, carry the loads, end it. What it writes to stderr goes to log. Raises CalledProcessError."""
    from cluster.cores import available_cores, thread_environment

    environment = os.environ | thread_environment(available_cores()) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    command = [sys.executable, "-m", __name__, json.dumps(asdict(job))]
    with log.open("w") as errors:
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True, check=True)
    return [Answered(**row) for row in json.loads(done.stdout.splitlines()[-1])]


def _carry(engine: Any, load: Load, first_index: int) -> Answered:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=load.max_tokens, ignore_eos=True)
    indices = iter(range(first_index, first_index + load.num_requests))
    tokens = accepted = rounds = 0
    started = time.perf_counter()
    for index, _ in zip(indices, range(load.batch), strict=False):
        engine.add_request(str(index), prompt(index), params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            if not output.finished:
                continue
            answer = output.outputs[0]
            tokens += len(answer.token_ids)
            if answer.spec_decode_metrics is not None:
                counted = answer.spec_decode_metrics.to_dict()
                accepted, rounds = accepted + counted["num_accepted_draft_tokens"], rounds + counted["num_spec_steps"]
            if (index := next(indices, -1)) >= 0:
                engine.add_request(str(index), prompt(index), params)
    return Answered(started, time.perf_counter(), tokens, 1.0 + accepted / max(rounds, 1))


def main() -> None:
    from vllm import LLM

    document = json.loads(sys.argv[1])
    loads = [Load(**load) for load in document["loads"]]
    speculative: dict[str, Any] = {}
    if document["k"]:
        speculative = {
            "speculative_config": {
                "method": "draft_model",
                "model": document["drafter"],
                "num_speculative_tokens": document["k"],
            },
            "per_request_spec_decode_metrics": "summary",
        }
    engine = LLM(
        document["target"],
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        kv_cache_memory_bytes=KV_CACHE_BYTES,
        max_num_seqs=max(load.batch for load in loads),
        enforce_eager=True,
        distributed_executor_backend="uni",
        **speculative,
    ).llm_engine
    _carry(engine, Load(loads[0].batch, loads[0].batch, 8), first_index=900_000)
    print("\n" + json.dumps([asdict(_carry(engine, load, first_index=0)) for load in loads]), flush=True)


if __name__ == "__main__":
    main()
