"""`outrider serve` of a tiny model, in processes of its own, for what has to be seen from its start to its end."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from outrider.deploy.server import WORKER_NICENESS
from tests.integration.test_cli import ENDS_WITHIN_S, LINE, command, write_config
from tests.serving import Models


@dataclass
class Served:
    process: subprocess.Popen[str]
    grpc: str
    http: str
    """host:port, both."""

    errors: Path

    def said(self) -> list[str]:
        """On stderr so far."""
        return self.errors.read_text().splitlines()

    def tree(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


@contextmanager
def outrider_serve(
    models: Models, directory: Path, environment: dict[str, str] | None = None, **changes: Any
) -> Iterator[Served]:
    """changes: sections of the configuration."""
    directory.mkdir(parents=True, exist_ok=True)
    errors = directory / "stderr"
    environment = {**os.environ, **(environment or {})}
    environment.pop(WORKER_NICENESS[0], None)  # what it sets by itself is under test
    with errors.open("w") as stderr:
        process = subprocess.Popen(
            command("serve", str(write_config(directory, models, **changes)), "--grpc-port", "0", "--http-port", "0"),
            stdout=subprocess.PIPE, stderr=stderr, text=True, cwd=Path(__file__).parents[2],
            env=environment,
        )  # fmt: skip
    assert process.stdout is not None
    try:
        found = LINE.fullmatch(process.stdout.readline())
        assert found, errors.read_text()[-3000:]
        yield Served(process, found["grpc"], found["http"], errors)
    finally:
        for _ in range(2):  # the second does not wait for what runs
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(ENDS_WITHIN_S / 2)
                except subprocess.TimeoutExpired:
                    continue
        process.kill()
        process.stdout.close()
