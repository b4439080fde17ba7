"""`outrider serve` when Ray is killed under it. (test_cli.py kills Serve's controller, which comes back.)"""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.integration.test_cli import (
    ENDS_WITHIN_S,
    LINE,
    command,
    still_running,
    write_config,
)
from tests.serving import Models

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]


def name_of(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return "ended meanwhile"


# A server of its own. In tests/unit, test_liveness.py has how it is seen and test_cli.py how the command ends.
@pytest.mark.exhaustive
def test_it_ends_with_ray(models: Models, tmp_path: Path) -> None:
    errors = tmp_path / "stderr"
    with errors.open("w") as stderr:
        process = subprocess.Popen(
            command("serve", str(write_config(tmp_path, models)), "--grpc-port", "0", "--http-port", "0"),
            stdout=subprocess.PIPE, stderr=stderr, text=True, cwd=Path(__file__).parents[2],
        )  # fmt: skip
    assert process.stdout is not None
    try:
        found = LINE.fullmatch(process.stdout.readline())
        assert found, errors.read_text()[-2000:]
        family = psutil.Process(process.pid).children(recursive=True)

        raylet = next(each for each in family if name_of(each) == "raylet")
        os.kill(raylet.pid, signal.SIGKILL)
        assert process.wait(ENDS_WITHIN_S) == 1
        said = [line for line in errors.read_text().splitlines() if line.startswith("outrider: serve: ")]
        print(said)
        assert len(said) == 1
        assert said[0].startswith("outrider: serve: Ray's raylet has ended")
        assert still_running(family) == []
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(ENDS_WITHIN_S)
