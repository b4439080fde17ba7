"""Starts and stops the servers of a benchmark: ``outrider serve``, ``vllm serve``, or a running one."""

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
"""The code of ``vllm serve``, whose script needs a distribution named vllm, which a CPU build does not have."""


class Started:
    """Ends a server that this process has started."""

    _process: subprocess.Popen[str] | None = None

    def stop(self) -> None:
        """Ends the server as an operator would, if it still runs."""
        if self._process is not None:
            end(self._process)
        self._process = None


class ServerProcess(Started):
    """Runs ``outrider serve`` once, on free ports. Its progress goes to our stderr."""

    def __init__(self, *arguments: str) -> None:
        self._arguments = [*arguments, "--grpc-port", "0", "--http-port", "0"]
        self.line = ""
        """Its line on stdout."""

    def start(self, waiting: Callable[[], None]) -> str:
        """Returns its gRPC address once it can answer. Raises BenchError.

        Args:
            waiting: Called from time to time meanwhile.
        """
        command = [sys.executable, "-m", "outrider.deploy.cli", "serve", *self._arguments]
        # Its own session, since an interrupt at the terminal must end the servers in order.
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
    """Runs a server of ours without a gateway, whose limits are not measured."""

    def __init__(self, config: OutriderConfig, path: Path, verbose: bool) -> None:
        """Writes the configuration to a path."""
        tree = config.model_dump(mode="json")
        tree["serving"] |= {"gateway": "off", "http_port": 0, "grpc_port": 0}
        path.write_text(yaml.safe_dump(tree))
        super().__init__(str(path), *(["--verbose"] if verbose else []))

    def start(self, waiting: Callable[[], None]) -> str:
        """Returns its HTTP address, as the other servers do."""
        super().start(waiting)
        return "http://" + self.line.partition("http=")[2].split()[0]


class RunningServer:
    """Stands for a running server of any kind with OpenAI's API."""

    def __init__(self, url: str) -> None:
        self._url = url

    def start(self, waiting: Callable[[], None]) -> str:
        if not is_healthy(self._url):
            raise BenchError(f"{self._url}/health: no server answers there; start it, or correct the address")
        return self._url

    def stop(self) -> None:
        """Leaves the server running."""


class VllmServer(Started):
    """Runs vLLM's own server, without Outrider."""

    def __init__(self, options: list[str], cores: str | None, log: Path) -> None:
        """Takes options of ``vllm serve``, and the value of VLLM_CPU_OMP_THREADS_BIND; None on GPUs."""
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
                start_new_session=True,  # as for a server of ours
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
    """Ends a server with SIGINT, and kills it and its descendants after STOPS_WITHIN_S."""
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
    """Returns vLLM's engine arguments for the target of a configuration.

    Scheduling is asynchronous, vLLM's default where the method allows it. On CPU it has the KV cache of both our
    engines and does not compile, as ours do not.

    Args:
        speculative: vLLM's speculative_config.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs

    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)} - {"async_scheduling"}
    target = config.target.model_dump(mode="json")
    given = {**target, **target.get("engine_args", {})}
    arguments = {name: value for name, value in given.items() if name in known and value is not None}
    if not gpu:
        kv_cache_bytes = arguments.get("kv_cache_memory_bytes") or CPU_KV_CACHE_BYTES
        if (speculative or {}).get("model"):
            kv_cache_bytes += getattr(config.drafter, "kv_cache_memory_bytes", None) or CPU_KV_CACHE_BYTES
        arguments = {"enforce_eager": True, **arguments, "kv_cache_memory_bytes": kv_cache_bytes}
    return arguments if speculative is None else {**arguments, "speculative_config": dict(speculative)}


def command_line(arguments: Mapping[str, Any]) -> list[str]:
    """Returns engine arguments as options of ``vllm serve``."""
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
