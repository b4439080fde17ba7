"""Outrider under the same closed loop: ``outrider serve`` with all its actors, and a client thread per request."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from deploy.client.sync_client import OutriderClient
from outrider.v1 import generation_pb2 as pb
from tests.bench.emulation.in_process import KV_CACHE_BYTES, MAX_MODEL_LEN
from tests.bench.emulation.load import Load, prompt
from tests.bench.emulation.pair import EmulatedPair

STOP_LIMIT_S = 90.0
HITS = ("main_line_hits", "side_branch_hits", "misses")
_COUNTS = ("drafted_rounds", "accepted", "late_rounds", *HITS)


@dataclass(frozen=True)
class Served:
    """One load's end. started_s, ended_s: of time.perf_counter. counts: of the verifier, over the load."""

    started_s: float
    ended_s: float
    tokens: int
    counts: dict[str, int]
    median_ms: dict[str, float]

    @property
    def acceptance_length(self) -> float:
        return 1.0 + self.counts["accepted"] / max(self.counts["drafted_rounds"], 1)

    @property
    def hits(self) -> dict[str, int]:
        return {name: self.counts[name] for name in HITS if name in self.counts}


def configuration(pair: EmulatedPair, k: int, max_num_seqs: int, speculation: dict[str, Any]) -> dict[str, Any]:
    """speculation: further keys of that section."""
    engine = {
        "dtype": "float32",
        "max_model_len": MAX_MODEL_LEN,
        "kv_cache_memory_bytes": KV_CACHE_BYTES,
        "max_num_seqs": max_num_seqs,
    }
    return {
        "target": {"model": str(pair.target), **engine},
        "drafter": {"method": "draft_model", "model": str(pair.drafter), **engine},
        "speculation": {"num_speculative_tokens": k, **speculation},
        "serving": {"grpc_port": 0, "http_port": 0},
    }


@contextmanager
def serving(config: dict[str, Any], directory: Path, log: Path) -> Iterator[OutriderClient]:
    """A running server's client. Progress and stack traces go to log. Raises RuntimeError when it does not start."""
    path = directory / "outrider.yaml"
    path.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "deploy.cli", "serve", str(path)]
    with log.open("w") as errors, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as server:
        assert server.stdout is not None
        try:
            line = server.stdout.readline()
            if "grpc=" not in line:
                raise RuntimeError(f"the server did not start; see {log}")
            with OutriderClient(line.partition("grpc=")[2].split()[0]) as client:
                yield client
        finally:
            server.send_signal(signal.SIGINT)
            try:
                server.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                server.kill()


def carry(client: OutriderClient, load: Load, k: int, first_index: int = 0) -> Served:
    indices = iter(range(first_index, first_index + load.num_requests))

    def keep_asking(_: int) -> int:
        tokens = 0
        for index in indices:
            answer = client.generate(
                prompt(index), temperature=0.0, max_tokens=load.max_tokens, num_speculative_tokens=k
            )
            tokens += answer.usage.completion_tokens
        return tokens

    before = client.status().rounds
    with ThreadPoolExecutor(load.batch) as pool:
        started = time.perf_counter()
        tokens = sum(pool.map(keep_asking, range(load.batch)))
        ended = time.perf_counter()
    after = client.status().rounds
    known = [name for name in _COUNTS if name in pb.RoundStatistics.DESCRIPTOR.fields_by_name]
    counts = {name: getattr(after, name) - getattr(before, name) for name in known}
    columns = [field.name for field in pb.RoundTime.DESCRIPTOR.fields if field.name.endswith("_ms")]
    return Served(started, ended, tokens, counts, {name: getattr(after.median, name) for name in columns})


def wait_until_drafting(client: OutriderClient, k: int, batch: int, limit_s: float = 60.0) -> None:
    """Ask until rounds have drafts: the drafter may link after the server answers. Raises RuntimeError."""
    give_up = time.monotonic() + limit_s
    for attempt in itertools.count():
        load = Load(batch, batch, 16)
        if carry(client, load, k, first_index=900_000 + attempt * batch).counts["drafted_rounds"] > 0:
            return
        if time.monotonic() > give_up:
            raise RuntimeError(f"no round had drafts within {limit_s:g} s; is the drafter linked?")
