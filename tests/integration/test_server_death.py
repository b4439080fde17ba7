"""`outrider serve` when Ray is killed under it. (test_cli.py kills Serve's controller, which comes back.)"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.support.cluster.outrider_serve import ENDS_WITHIN_S, outrider_serve
from tests.support.cluster.processes import alive
from tests.support.cluster.serving import Models, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]


def name_of(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return "ended meanwhile"


# A server of its own. In tests/unit, test_liveness.py has how it is seen and test_cli.py how the command ends.
@pytest.mark.exhaustive
def test_it_ends_with_ray(models: Models, tmp_path: Path) -> None:
    with outrider_serve(models, tmp_path) as server:
        family = server.tree()
        raylet = next(each for each in family if name_of(each) == "raylet")
        os.kill(raylet.pid, signal.SIGKILL)
        assert server.process.wait(ENDS_WITHIN_S) == 1
        said = [line for line in server.said() if line.startswith("outrider: serve: ")]
        print(said)
        assert len(said) == 1
        assert said[0].startswith("outrider: serve: Ray's raylet has ended")
        wait_until(lambda: not alive(family), 60.0, "the end of all its processes")
