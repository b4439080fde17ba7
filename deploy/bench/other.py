"""The other side's process, as the benchmark holds it: vLLM's engine started, asked and ended."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from cluster.config import DraftModelConfig, OutriderConfig
from cluster.cores import thread_environment
from deploy.bench.answers import Answer, Ask
from deploy.bench.error import BenchError
from deploy.processes import tree_of

POLL_S = 0.5
ENDS_WITHIN_S = 30.0

Cores = tuple[tuple[int, ...], ...]


def engine_arguments(config: OutriderConfig, k: int | None, compile_models: bool = False) -> dict[str, Any]:
    """vLLM's engine arguments for the configuration's models in one process. k None: no speculation.

    It gets the KV cache of both our engines; what is None is left to the platform.
    """
    target, drafter = config.target, config.drafter
    arguments = target.model_dump(exclude={"cores"})  # every other key is vLLM's
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
                [sys.executable, "-m", "deploy.bench.in_process"],
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
