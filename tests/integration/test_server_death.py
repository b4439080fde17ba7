"""`outrider serve` when what it runs on is killed under it: Serve's controller comes back, Ray does not."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from outrider.deploy.client.sync_client import OutriderClient
from tests.integration.test_cli import (
    ENDS_WITHIN_S,
    LINE,
    PROMPT,
    command,
    write_config,
)
from tests.serving import HANG_GUARD_S, Models, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]


def test_it_outlives_serves_controller_and_ends_with_ray(models: Models, tmp_path: Path) -> None:
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

        controller = next(each for each in family if "ServeController" in "".join(each.cmdline()))
        os.kill(controller.pid, signal.SIGKILL)
        wait_until(lambda: _new_controller(process.pid, controller.pid), HANG_GUARD_S, "another controller")
        with OutriderClient(found["grpc"]) as client:
            assert client.generate(PROMPT, max_tokens=4, temperature=0.0, timeout_s=HANG_GUARD_S).token_ids
        assert process.poll() is None, errors.read_text()[-2000:]

        raylet = next(each for each in family if each.name() == "raylet")
        os.kill(raylet.pid, signal.SIGKILL)
        assert process.wait(ENDS_WITHIN_S) == 1
        said = [line for line in errors.read_text().splitlines() if line.startswith("outrider: serve: ")]
        print(said)
        assert len(said) == 1
        assert said[0].startswith("outrider: serve: Ray's raylet has ended")
        _, alive = psutil.wait_procs(family, timeout=5)
        assert [each for each in alive if each.status() != psutil.STATUS_ZOMBIE] == []
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(ENDS_WITHIN_S)


def _new_controller(server_pid: int, old_pid: int) -> bool:
    for each in psutil.Process(server_pid).children(recursive=True):
        try:
            if each.pid != old_pid and "ServeController" in "".join(each.cmdline()):
                return True
        except psutil.Error:
            continue
    return False
