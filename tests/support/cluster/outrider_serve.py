"""`outrider serve` of a tiny model, in processes of its own, for what has to be seen from its start to its end."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests.support.cluster.serving import Models, engine

ENDS_WITHIN_S = 240.0
LINE = re.compile(r"outrider: serving (?P<model>\S+) grpc=(?P<grpc>\S+:\d+) http=(?P<http>\S+:\d+)\n")


@dataclass
class Served:
    process: subprocess.Popen[str]
    grpc: str
    http: str
    """host:port, both."""

    errors: Path

    def said(self) -> list[str]:
        """Return the lines on stderr so far."""
        return self.errors.read_text().splitlines()

    def tree(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "outrider.deploy.cli", *arguments]


def write_config(directory: Path, models: Models, **changes: Any) -> Path:
    """A configuration file of a tiny target and an ngram drafter. changes: sections to merge in."""
    tree: dict[str, Any] = {"target": engine(models.target), "drafter": {"method": "ngram"}}
    for section, values in changes.items():
        tree[section] = values if section not in tree or "method" in values else {**tree[section], **values}
    path = directory / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


@contextmanager
def outrider_serve(
    models: Models,
    directory: Path,
    environment: Mapping[str, str | None] | None = None,
    prefix: Sequence[str] = (),
    **changes: Any,
) -> Iterator[Served]:
    """environment: beside ours; None takes one away. prefix: a command that becomes the one after it. changes:
    sections of the configuration."""
    directory.mkdir(parents=True, exist_ok=True)
    errors = directory / "stderr"
    together = {**os.environ, **(environment or {})}
    serve = command("serve", str(write_config(directory, models, **changes)), "--grpc-port", "0", "--http-port", "0")
    with errors.open("w") as stderr:
        process = subprocess.Popen(
            [*prefix, *serve],
            stdout=subprocess.PIPE, stderr=stderr, text=True, cwd=Path(__file__).parents[3],
            env={name: value for name, value in together.items() if value is not None},
        )  # fmt: skip
    assert process.stdout is not None
    try:
        # At its end, too, when the server fails; pytest's timeout guards the wait.
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
