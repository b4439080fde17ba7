"""`make test` fails when either part fails, runs the second whatever the first came to, and says how both went."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import run_parts

PASSES, FAILS = "def test_it(): pass\n", "def test_it(): assert False\n"


@pytest.mark.parametrize("unit", [PASSES, FAILS])
def test_the_status_and_the_last_lines(tmp_path: Path, unit: str) -> None:
    for directory, source in (("unit", unit), ("integration", PASSES), ("faults", PASSES), ("security", PASSES)):
        (tmp_path / "tests" / directory).mkdir(parents=True)
        (tmp_path / "tests" / directory / f"test_{directory}.py").write_text(source)
    done = subprocess.run(
        [sys.executable, run_parts.__file__, "-p", "no:cacheprovider"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == int(unit is FAILS), done.stdout + done.stderr
    first, second = done.stdout.splitlines()[-2:]
    assert first.startswith("unit tests:    1 " + ("failed" if unit is FAILS else "passed") + " in ")
    assert second.startswith("served tests:  3 passed in ")


@pytest.mark.parametrize(
    ("results", "status"), [((5, 0), 0), ((0, 5), 0), ((5, 5), 5), ((5, 1), 1), ((0, -9), 9), ((-9, 0), 9), ((2, 0), 2)]
)
def test_an_empty_part_is_no_failure_but_a_killed_one_is(
    monkeypatch: pytest.MonkeyPatch, results: tuple[int, int], status: int
) -> None:
    left = list(results)
    monkeypatch.setattr(run_parts, "run", lambda _: (left.pop(0), "summary"))
    assert run_parts.main([]) == status


def test_no_test_at_all_is_no_success(tmp_path: Path) -> None:
    (tmp_path / "tests" / "unit").mkdir(parents=True)
    done = subprocess.run(
        [sys.executable, run_parts.__file__, "--only", "unit"], cwd=tmp_path, capture_output=True, check=False
    )
    assert done.returncode != 0
