"""`make test` fails when either part fails, runs the second whatever the first came to, and says how both went."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import conftest, run_parts

PASSES, FAILS = "def test_it(): pass\n", "def test_it(): assert False\n"

NO_OTHER_PLUGINS = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin"}
"""Loading all that are installed takes each of a run's six processes seconds."""


def test_the_first_half_is_of_things_that_exist() -> None:
    """What it does not know runs in the second."""
    tests = Path(run_parts.__file__).parent
    folders = ("integration", "faults", "security")
    files = {path.stem for folder in folders for path in (tests / folder).glob("test_*.py")}
    assert conftest.FIRST_HALF - files - {*conftest.DEPLOYMENTS, *conftest.FOLDERS} == set()
    assert all((tests / "integration" / folder).is_dir() for folder in conftest.FOLDERS)


def test_the_status_and_the_last_lines(tmp_path: Path) -> None:
    """test_draft_engine.py is one of the first half's files."""
    ours = Path(run_parts.__file__).parent
    for path, source in (
        ("pytest.ini", "[pytest]\nmarkers =\n    exhaustive\n"),
        *((f"tests/{name}", (ours / name).read_text()) for name in ("conftest.py", "support/threads.py")),
        ("tests/unit/test_unit.py", FAILS),
        ("tests/integration/test_draft_engine.py", PASSES),
        ("tests/integration/test_cli.py", PASSES),
        ("tests/faults/test_registry.py", PASSES),
        ("tests/security/test_tls.py", PASSES),
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(source)
    done = subprocess.run(
        [sys.executable, run_parts.__file__, "-p", "no:cacheprovider"],
        cwd=tmp_path, env=NO_OTHER_PLUGINS, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    of_unit, first, second = done.stdout.splitlines()[-3:]
    assert re.match("unit tests: +1 failed in ", of_unit)
    assert re.match("served tests, half 1: +1 passed, 3 deselected in ", first)
    assert re.match("served tests, half 2: +3 passed, 1 deselected in ", second)
    reports = [line for line in done.stdout.splitlines() if line.startswith("===") and " in " in line]
    assert len(reports) == 3, "what both halves print is there, one after the other"


@pytest.mark.parametrize(
    ("results", "status"),
    [
        *(((5, 0, 0), 0), ((0, 5, 0), 0), ((0, 0, 5), 0), ((5, 5, 5), 5), ((5, 1, 0), 1), ((5, 0, 1), 1)),
        *(((0, -9, 0), 9), ((-9, 0, 0), 9), ((0, 0, -9), 9), ((2, 0, 0), 2)),
    ],
)
def test_an_empty_part_is_no_failure_but_a_killed_one_is(
    monkeypatch: pytest.MonkeyPatch, results: tuple[int, int, int], status: int
) -> None:
    left = list(results)
    monkeypatch.setattr(run_parts, "run", lambda jobs, _: {name: (left.pop(0), "summary") for name in jobs})
    assert run_parts.main([]) == status
