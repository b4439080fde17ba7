"""Targets, drafters and their nodes follow callers who come and go, none of whose requests fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.wire import can_make_hosts

pytestmark = [
    pytest.mark.engine,
    pytest.mark.exhaustive,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not can_make_hosts(), reason="no right to make namespaces"),
]


def test_everything_follows_and_no_request_fails(tmp_path: Path) -> None:
    """That it follows, and that all answers are the target's own, is what the run itself sees to."""
    out = tmp_path / "scaling"
    subprocess.run([sys.executable, "-m", "tests.bench.scaling_nodes", "--scale", "0", "--out", out], check=True)
    result = json.loads(out.with_suffix(".json").read_text())
    assert result["requests"]
    assert [request["error"] for request in result["requests"] if request["error"]] == []
    assert out.with_suffix(".png").stat().st_size > 0
