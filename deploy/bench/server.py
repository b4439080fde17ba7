"""Our side of a benchmark: ``outrider serve`` as a process of its own, asked over gRPC like any other server."""

from __future__ import annotations

import selectors
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import yaml

from cluster.config import OutriderConfig
from deploy.bench.error import BenchError
from deploy.processes import tree_of

POLL_S = 1.0
STOPS_WITHIN_S = 90.0


class ServerProcess:
    """start once, stop once. The server's progress goes to our stderr."""

    def __init__(self, config: OutriderConfig, directory: Path, verbose: bool = False) -> None:
        """directory: where its configuration file is written."""
        self._path = directory / "config.yaml"
        self._path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
        self._verbose = verbose
        self._process: subprocess.Popen[str] | None = None

    def start(self, waiting: Callable[[], None]) -> str:
        """Return its gRPC address when it can answer. waiting: called now and then meanwhile. Raises BenchError."""
        command = [sys.executable, "-m", "deploy.cli", "serve", str(self._path), "--grpc-port", "0", "--http-port", "0"]
        if self._verbose:
            command.append("--verbose")
        # Its own session: an interrupt at the terminal is ours to pass on, in order.
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while not selector.select(POLL_S):
                waiting()
        line = self._process.stdout.readline()
        if "grpc=" not in line:
            raise BenchError(
                f"our side: the server ended with exit code {self._process.wait()}; its last line says why"
            )
        return line.partition("grpc=")[2].split()[0]

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
