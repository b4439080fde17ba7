"""The configuration pages say what the code says."""

import re

import pytest

from outrider.cluster.config_reference import ENGINE_ARGS_PATH, PATH, render, render_engine_args
from outrider.cluster.engine_args import schema


@pytest.mark.parametrize(("path", "rendered"), [(PATH, render), (ENGINE_ARGS_PATH, render_engine_args)])
def test_pages_are_fresh(path, rendered):
    assert path.read_text() == rendered(), "run: python -m outrider.cluster.config_reference"


def test_every_key_is_explained() -> None:
    unexplained = [line for line in render().splitlines() if line.startswith("| `") and line.endswith("|  |")]
    assert unexplained == []


@pytest.mark.parametrize("side", [1, 2], ids=["target", "drafter"])
def test_every_engine_argument_has_its_place_once(side):
    rows = [line.split("|") for line in render_engine_args().split("\n## ")[side].splitlines() if line.startswith("| ")]
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row[2])]
    assert sorted(named) == sorted(schema()["properties"])
    assert all(row[3].strip() for row in rows[1:])
