"""The servers of a benchmark, each a process of its own: `outrider serve`, `vllm serve`, or one that runs already."""

from __future__ import annotations

import dataclasses
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import yaml

from outrider.cluster.config import OutriderConfig
from outrider.cluster.device_defaults import CPU_KV_CACHE_BYTES
from outrider.cluster.placement import available_cores, thread_environment
from outrider.deploy.bench.machine import BenchError

POLL_S = 1.0
STOPS_WITHIN_S = 90.0

VLLM_SERVE = "from vllm.entrypoints.launchers.api_server.entry import main; main()"
"""`vllm serve` itself asks for a distribution of vLLM's usual name, which a build for CPU does not have."""


class Started:
    """A server that this process starts once and stops once."""

    _process: subprocess.Popen[str] | None = None

    def stop(self) -> None:
        """End it as an operator would. No effect when it runs no more."""
        if self._process is not None:
            end(self._process)
        self._process = None


class ServerProcess(Started):
    """``outrider serve``, on free ports: start once, stop once. Its progress goes to our stderr."""

    def __init__(self, *arguments: str) -> None:
        self._arguments = [*arguments, "--grpc-port", "0", "--http-port", "0"]
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
            while not selector.select(POLL_S):
                waiting()
        self.line = self._process.stdout.readline().strip()
        if "grpc=" not in self.line:
            raise BenchError(f"the server ended with exit code {self._process.wait()}; its last line says why")
        return self.line.partition("grpc=")[2].split()[0]


class OutriderServer(ServerProcess):
    """A server of ours for the run, without its gateway, whose limits and keys are not what is measured."""

    def __init__(self, config: OutriderConfig, path: Path, verbose: bool) -> None:
        """path: where to write the configuration."""
        tree = config.model_dump(mode="json")
        tree["serving"] |= {"gateway": "off", "http_port": 0, "grpc_port": 0}
        path.write_text(yaml.safe_dump(tree))
        super().__init__(str(path), *(["--verbose"] if verbose else []))

    def start(self, waiting: Callable[[], None]) -> str:
        """Return its HTTP address, as the other servers do."""
        super().start(waiting)
        return "http://" + self.line.partition("http=")[2].split()[0]


class RunningServer:
    """A server that somebody else has started, of any kind that speaks OpenAI's API."""

    def __init__(self, url: str) -> None:
        self._url = url

    def start(self, waiting: Callable[[], None]) -> str:
        if not is_healthy(self._url):
            raise BenchError(f"{self._url}/health: no server answers there; start it, or correct the address")
        return self._url

    def stop(self) -> None:
        """Leave it as it is."""


class VllmServer(Started):
    """vLLM's own server, with nothing of Outrider in it."""

    def __init__(self, options: list[str], cores: str | None, log: Path) -> None:
        """options: of `vllm serve`. cores: of its model's threads, as VLLM_CPU_OMP_THREADS_BIND; None on GPUs."""
        self._options, self._log = options, log
        self.environment = {"VLLM_NO_USAGE_STATS": "1"}
        if cores is not None:
            self.environment |= thread_environment(available_cores()) | {"VLLM_CPU_OMP_THREADS_BIND": cores}

    def start(self, waiting: Callable[[], None]) -> str:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        command = [sys.executable, "-c", VLLM_SERVE, "--host", "127.0.0.1", "--port", str(port), *self._options]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command,
                env=os.environ | self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,  # an interrupt at the terminal is ours to pass on, in order
            )
        url = f"http://127.0.0.1:{port}"
        while not is_healthy(url):
            if (code := self._process.poll()) is not None:
                errors = [line.strip() for line in self._log.read_text().splitlines() if "rror" in line]
                raise BenchError(f"vllm serve ended with exit code {code}: {(errors or ['no error in its log'])[-1]}")
            time.sleep(POLL_S)
            waiting()
        return url


def end(process: subprocess.Popen[str]) -> None:
    """End a server with SIGINT, and kill what is left of it after STOPS_WITHIN_S."""
    below: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        below = psutil.Process(process.pid).children(recursive=True)
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(STOPS_WITHIN_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    _, alive = psutil.wait_procs(below, timeout=5.0)
    for left in alive:
        with suppress(psutil.NoSuchProcess):
            left.kill()


def engine_arguments(config: OutriderConfig, speculative: Mapping[str, Any] | None, gpu: bool) -> dict[str, Any]:
    """vLLM's engine arguments for the configuration's target, with what it leaves out left to vLLM.

    Scheduling is asynchronous, which is vLLM's default where the method allows it. On CPU it has the KV cache of both
    our engines, and does not compile, as ours do not. speculative: vLLM's speculative_config.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs

    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)} - {"async_scheduling"}
    target = config.target.model_dump(mode="json")
    given = {**target, **target.get("engine_args", {})}
    arguments = {name: value for name, value in given.items() if name in known and value is not None}
    if not gpu:
        models = 2 if (speculative or {}).get("model") else 1
        arguments = {"enforce_eager": True, "kv_cache_memory_bytes": models * CPU_KV_CACHE_BYTES, **arguments}
    return arguments if speculative is None else {**arguments, "speculative_config": dict(speculative)}


def command_line(arguments: Mapping[str, Any]) -> list[str]:
    """Engine arguments as `vllm serve` takes them."""
    line: list[str] = []
    for name, value in arguments.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            line.append(f"--{option}" if value else f"--no-{option}")
        else:
            line += [f"--{option}", json.dumps(value) if isinstance(value, (dict, list)) else str(value)]
    return line


def is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


Server = OutriderServer | RunningServer | VllmServer
