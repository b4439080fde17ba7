"""`make test` fails when either part fails, runs the second whatever the first came to, and says how both went."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import conftest, run_parts


def test_the_first_half_is_of_things_that_exist() -> None:
    """What it does not know runs in the second."""
    tests = Path(run_parts.__file__).parent
    folders = ("integration", "faults", "security")
    files = {path.stem for folder in folders for path in (tests / folder).glob("test_*.py")}
    assert conftest.FIRST_HALF - files - {*conftest.DEPLOYMENTS, *conftest.FOLDERS} == set()
    assert all((tests / "integration" / folder).is_dir() for folder in conftest.FOLDERS)


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
