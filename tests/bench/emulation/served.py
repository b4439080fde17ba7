"""Outrider under the same closed loop: ``outrider serve`` with all its actors, and a client thread per request.

The server is a command of some tree's environment, and all that is known of it is its configuration, the line that it
prints and its gRPC API: another tree's can be measured too.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from outrider.deploy.client.sync_client import OutriderClient
from tests.bench.emulation import plugin
from tests.bench.emulation.in_process import KV_CACHE_BYTES, MAX_MODEL_LEN
from tests.bench.emulation.load import ClosedLoop, Load, prompt
from tests.bench.emulation.pair import EmulatedPair

STOP_LIMIT_S = 90.0
COUNTS = (
    "drafted_rounds", "accepted", "late_rounds", "main_line_hits", "side_branch_hits", "misses", "path_rounds",
    "path_rows", "path_tokens",
)  # fmt: skip


@dataclass(frozen=True)
class Served:
    """One load's end. started_s, ended_s: of time.perf_counter. counts: of the verifier, over the load."""

    started_s: float
    ended_s: float
    tokens: int
    counts: dict[str, int]


def environment_of(tree: Path | None) -> Path:
    """The ``outrider`` command of a tree's .venv; None: of this environment. Raises FileNotFoundError."""
    command = (Path(sys.executable).parent if tree is None else tree / ".venv" / "bin").absolute() / "outrider"
    if not command.exists():
        raise FileNotFoundError(f"{command}: not there; install that tree into its .venv (make setup)")
    return command


def configuration(
    pair: EmulatedPair, k: int, max_num_seqs: int, sections: Mapping[str, Mapping[str, Any]], one_pass: bool = False
) -> dict[str, Any]:
    """sections: further keys, by section. one_pass: the drafter has a mask token."""
    drafter = pair.drafters[False, one_pass]
    engine = {
        "dtype": "float32",
        "max_model_len": MAX_MODEL_LEN,
        "kv_cache_memory_bytes": KV_CACHE_BYTES,
        "max_num_seqs": max_num_seqs,
    }
    config: dict[str, dict[str, Any]] = {
        "target": {"model": str(pair.target), **engine},
        "drafter": {"method": "draft_model", "model": str(drafter), **engine},
        "speculation": {"num_speculative_tokens": k},
        "serving": {"gateway": {"grpc_port": 0, "http_port": 0}},
    }
    for name, keys in sections.items():
        config[name] = {**config.get(name, {}), **keys}
    return config


@contextmanager
def serving(
    config: dict[str, Any], directory: Path, name: str = "outrider", tree: Path | None = None
) -> Iterator[OutriderClient]:
    """A running server's client. Works in directory; progress and stack traces go to NAME.log there. Raises
    RuntimeError when it does not start."""
    path, log = directory / f"{name}.yaml", directory / f"{name}.log"
    path.write_text(yaml.safe_dump(config))
    environment = os.environ | plugin.environment(directory / "plugin")
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [str(environment_of(tree)), "serve", str(path)],
            env=environment,
            cwd=directory,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as server,
    ):
        assert server.stdout is not None
        try:
            line = server.stdout.readline()
            if "grpc=" not in line:
                raise RuntimeError(f"the server did not start; see {log}: {log.read_text()[-2000:]}")
            with OutriderClient(line.partition("grpc=")[2].split()[0]) as client:
                yield client
        finally:
            end(server)


def end(server: subprocess.Popen[Any]) -> None:
    """As a user does, and where that takes too long by force."""
    server.send_signal(signal.SIGINT)
    try:
        server.wait(STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        server.kill()


def carry(client: OutriderClient, load: Load, is_enough: Callable[[], bool], first_index: int = 0) -> Served:
    """Raises RuntimeError when a request did not get all tokens it asked for."""
    loop = ClosedLoop(load, is_enough, first_index)

    def keep_asking(index: int | None) -> int:
        tokens = 0
        while index is not None:
            answer = client.generate(
                prompt(index), temperature=load.temperature, max_tokens=load.max_tokens, ignore_eos=True
            )
            tokens += answer.usage.completion_tokens
            index = loop.after_one_ended()
        return tokens

    before = client.status().rounds
    with ThreadPoolExecutor(load.batch) as pool:
        started = time.perf_counter()
        tokens = sum(pool.map(keep_asking, loop.first()))
        ended = time.perf_counter()
    if tokens != loop.tokens:
        raise RuntimeError(f"{tokens} of {loop.tokens} tokens ran")
    after = client.status().rounds
    return Served(started, ended, tokens, {name: getattr(after, name) - getattr(before, name) for name in COUNTS})


def wait_until_all_draft(client: OutriderClient, num_targets: int, limit_s: float = 120.0) -> None:
    """Ask one request of each of several targets that serve one at a time, until all of them were drafted for. Raises
    RuntimeError."""
    give_up = time.monotonic() + limit_s
    for attempt in itertools.count():

        def ask(index: int, attempt: int = attempt) -> bool:
            answer = client.generate(prompt(900_000 + attempt * num_targets + index), max_tokens=64, ignore_eos=True)
            return answer.metrics.speculative_decoding.num_draft_tokens > 0

        with ThreadPoolExecutor(num_targets) as pool:
            if all(pool.map(ask, range(num_targets))):
                return
        if time.monotonic() > give_up:
            raise RuntimeError(f"a target had no drafts within {limit_s:g} s; are all linked?")


def wait_until_drafting(client: OutriderClient, batch: int, limit_s: float = 60.0) -> None:
    """Ask until rounds have drafts: the drafter may link after the server answers. Raises RuntimeError."""
    give_up = time.monotonic() + limit_s
    for attempt in itertools.count():
        load = Load(batch, 0, 16)
        if carry(client, load, lambda: True, first_index=900_000 + attempt * batch).counts["drafted_rounds"] > 0:
            return
        if time.monotonic() > give_up:
            raise RuntimeError(f"no round had drafts within {limit_s:g} s; is the drafter linked?")
