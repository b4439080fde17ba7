"""The two sides of a benchmark, each a process of its own: started, asked one turn at a time, and ended, with the CPU
time of what stands behind it.

Ours is ``outrider serve``, asked over gRPC like any other server; the other one is vLLM's engine.
"""

from __future__ import annotations

import json
import os
import queue
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import psutil

from outrider.cluster.config import DraftModelConfig, OutriderConfig
from outrider.cluster.placement import thread_environment
from outrider.deploy.bench.arguments import Load
from outrider.deploy.bench.load import Answer, Ask, SideName, ask_all
from outrider.deploy.bench.machine import BenchError
from outrider.deploy.client.sync_client import OutriderClient
from outrider.deploy.processes import tree_of

START_POLL_S = 1.0
STOPS_WITHIN_S = 90.0


POLL_S = 0.5

ENDS_WITHIN_S = 30.0

Cores = tuple[tuple[int, ...], ...]

SETTLE_WINDOW_S = 0.25

SETTLES_WITHIN_S = 10.0

UNKNOWN_SETTLE_S = 1.5
"""vLLM's worker queues poll for one second after their last message; for a server whose processes are not known."""

RESTING_CORES = 0.5
"""CPU seconds a second below which engines rest: one that polls takes a whole core, Ray's own processes a few per
cent."""

OnProgress = Callable[[int, int], None]


class ServerProcess:
    """``outrider serve``, on free ports: start once, stop once. Its progress goes to our stderr."""

    def __init__(self, *arguments: str) -> None:
        self._arguments = [*arguments, "--grpc-port", "0", "--http-port", "0"]
        self._process: subprocess.Popen[str] | None = None
        self.line = ""
        """What it says on stdout when it can answer."""

    def start(self, waiting: Callable[[], None]) -> str:
        """Return its gRPC address when it can answer. waiting: called now and then meanwhile. Raises BenchError."""
        command = [sys.executable, "-m", "outrider.deploy.cli", "serve", *self._arguments]
        # Its own session: an interrupt at the terminal is ours to pass on, in order.
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while not selector.select(START_POLL_S):
                waiting()
        self.line = self._process.stdout.readline().strip()
        if "grpc=" not in self.line:
            raise BenchError(f"the server ended with exit code {self._process.wait()}; its last line says why")
        return self.line.partition("grpc=")[2].split()[0]

    def processes(self) -> list[psutil.Process]:
        """Its own and those below it."""
        return [] if self._process is None else tree_of(self._process.pid)

    def stop(self) -> None:
        """As an operator would. No effect when it runs no more."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(STOPS_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None


_NOT_VLLMS = {"cores", "node_labels", "lora", "multimodal"}
"""Keys of ``target`` that are no engine arguments: where ranks run, and what the comparison does not ask for."""


def engine_arguments(config: OutriderConfig, k: int | None, compile_models: bool = False) -> dict[str, Any]:
    """vLLM's engine arguments for the configuration's models in one process. k None: no speculation.

    It gets the KV cache of both our engines, and the target's ``engine_args``; what is None is left to the platform.
    """
    target, drafter = config.target, config.drafter
    arguments = target.model_dump(exclude=_NOT_VLLMS)
    arguments["async_scheduling"] = target.schedules_ahead
    if compile_models:
        arguments["enforce_eager"] = False
    if k is None:
        return arguments
    if not isinstance(drafter, DraftModelConfig):
        raise ValueError("in-process speculation needs a drafter model")
    if target.kv_cache_memory_bytes is not None and drafter.kv_cache_memory_bytes is not None:
        arguments["kv_cache_memory_bytes"] = target.kv_cache_memory_bytes + drafter.kv_cache_memory_bytes
    arguments["per_request_spec_decode_metrics"] = "summary"
    arguments["speculative_config"] = {
        "method": "draft_model",
        "model": drafter.model,
        "num_speculative_tokens": k,
        **({"revision": drafter.revision} if drafter.revision else {}),
    }
    return arguments


def environment(cores: Cores | None) -> dict[str, str]:
    """What vLLM is at its best with: preloaded libraries, and its own binding of threads to ``cores``, by rank.

    cores None: on GPUs.
    """
    settings = {"VLLM_NO_USAGE_STATS": "1"}
    if cores is not None:
        settings |= thread_environment(sorted({core for rank in cores for core in rank}))
        settings["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, rank)) for rank in cores)
    return settings


class InProcessEngine:
    """start, run as often as needed, stop. From one thread."""

    def __init__(self, arguments: dict[str, Any], cores: Cores | None, log: Path, verbose: bool = False) -> None:
        self._arguments, self._log, self._verbose = arguments, log, verbose
        self._environment = environment(cores)
        self._process: subprocess.Popen[str] | None = None
        self._ready = False
        self._messages: queue.Queue[dict[str, Any] | None] = queue.Queue()

    @property
    def environment(self) -> dict[str, str]:
        return dict(self._environment)

    def start(self, waiting: Callable[[], None]) -> dict[str, Any]:
        """Load the models. Returns the engine arguments as used. waiting: called now and then meanwhile.

        Raises BenchError.
        """
        level = {} if self._verbose else {"VLLM_LOGGING_LEVEL": "ERROR"}
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "outrider.deploy.bench.in_process"],
                env={**os.environ, **level, **self._environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=None if self._verbose else log,
                text=True,
                start_new_session=True,  # an interrupt at the terminal is ours to pass on, in order
            )
        threading.Thread(target=self._read, args=(self._process,), daemon=True).start()
        self._send({"engine": self._arguments})
        while "ready" not in (message := self._next(waiting)):
            pass
        self._ready = True
        ready: dict[str, Any] = message["ready"]
        return ready

    def run(
        self, asks: Sequence[Ask], concurrency: int, on_progress: Callable[[int, int], None]
    ) -> tuple[float, list[Answer]]:
        """One turn: (seconds, answers). on_progress gets answers and tokens so far. Raises BenchError."""
        self._send({"asks": [asdict(ask) for ask in asks], "concurrency": concurrency})
        so_far = (0, 0)
        while "answers" not in (message := self._next(lambda: on_progress(*so_far))):  # noqa: B023 - called in here
            so_far = message["done"], message["tokens"]
        return message["seconds"], [Answer.from_json(answer) for answer in message["answers"]]

    def processes(self) -> list[psutil.Process]:
        """Its own and those below it."""
        return [] if self._process is None else tree_of(self._process.pid)

    def stop(self) -> None:
        """End it with everything below it that still belongs to it; no effect when it runs no more."""
        if self._process is None:
            return
        below = self.processes()[1:]
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            # While it loads it hears nothing.
            self._process.wait(ENDS_WITHIN_S if self._ready else 0.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        _, alive = psutil.wait_procs(below, timeout=5.0)
        for process in alive:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process = None

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._gone() from None

    def _next(self, waiting: Callable[[], None]) -> dict[str, Any]:
        while True:
            try:
                message = self._messages.get(timeout=POLL_S)
            except queue.Empty:
                waiting()
                continue
            if message is None:
                raise self._gone()
            if "error" in message:
                raise BenchError(f"the other side: {message['error']}{self._where()}")
            return message

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._messages.put(json.loads(line))
        self._messages.put(None)

    def _gone(self) -> BenchError:
        code = self._process.wait() if self._process is not None else None
        return BenchError(f"the other side's engine ended with exit code {code}{self._where()}")

    def _where(self) -> str:
        if self._verbose or not self._log.exists():
            return ""
        errors = [line for line in self._log.read_text(errors="replace").splitlines() if "Error" in line]
        return f" (its log says: {errors[-1].strip()})" if errors else ""


class Side(Protocol):
    name: SideName

    def run(self, asks: Sequence[Ask], on_progress: OnProgress) -> tuple[float, list[Answer]]:
        """One turn: seconds from the first request to the last stream's end, and the answers. Raises BenchError."""

    def cpu_seconds(self) -> float | None:
        """Used so far by every process behind it. None: they are not known."""


class OurSide:
    """A server, asked over gRPC. server None: somebody else's, of which only the address is known."""

    def __init__(
        self, client: OutriderClient, load: Load, server: ServerProcess | None, name: SideName = "ours"
    ) -> None:
        self.name, self.client, self._load, self._server = name, client, load, server

    def run(self, asks: Sequence[Ask], on_progress: OnProgress) -> tuple[float, list[Answer]]:
        return ask_all(self.client, asks, self._load.concurrency, on_progress, self._load.verification)

    def cpu_seconds(self) -> float | None:
        return None if self._server is None else total_cpu_seconds(self._server.processes())


class OtherSide:
    """vLLM's engine in a process of its own."""

    name: SideName = "other"

    def __init__(self, engine: InProcessEngine, load: Load) -> None:
        self._engine, self._load = engine, load

    def run(self, asks: Sequence[Ask], on_progress: OnProgress) -> tuple[float, list[Answer]]:
        return self._engine.run(asks, self._load.concurrency, on_progress)

    def cpu_seconds(self) -> float | None:
        return total_cpu_seconds(self._engine.processes())


def total_cpu_seconds(processes: Iterable[psutil.Process]) -> float:
    total = 0.0
    for process in processes:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def busy_cpu_seconds() -> float:
    """Of this machine's cores so far, whoever used them."""
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    # The kernel counts guests into user time, too.
    guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
    return float(sum(times) - idle - guests)


def settle(sides: Sequence[Side], sleep: Callable[[float], None]) -> float:
    """Wait until no engine polls any more. Returns the CPU seconds a second that they last used together.

    sleep: waits, or raises. Gives up after SETTLES_WITHIN_S; whoever reports decides what that means.
    """
    if any(side.cpu_seconds() is None for side in sides):
        sleep(UNKNOWN_SETTLE_S)
    limit = time.monotonic() + SETTLES_WITHIN_S
    while True:
        before, started = _cpu_seconds(sides), time.monotonic()
        sleep(SETTLE_WINDOW_S)
        cores = max(_cpu_seconds(sides) - before, 0.0) / (time.monotonic() - started)
        if cores < RESTING_CORES or time.monotonic() > limit:
            return cores


def _cpu_seconds(sides: Sequence[Side]) -> float:
    return sum(side.cpu_seconds() or 0.0 for side in sides)
