"""What every test gets: no call to a model hub, no usage report, and Outrider's home in a directory of its own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Set before anything imports Ray, vLLM or the hub's client, which read them once.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture
def outrider_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty OUTRIDER_HOME: no model is fetched."""
    home = tmp_path / "home"
    monkeypatch.setenv("OUTRIDER_HOME", str(home))
    return home
