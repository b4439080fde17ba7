"""What `make test` says and does about the browser, without installing anything."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests import install_chromium


@pytest.fixture
def empty_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(install_chromium.REQUIRED, raising=False)
    return tmp_path


def program(directory: Path, name: str) -> None:
    (directory / name).write_text("#!/bin/sh\n")
    (directory / name).chmod(0o755)


def test_nothing_to_do(empty_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in install_chromium.PROGRAMS:
        program(empty_path, name)
    assert install_chromium.main() == 0
    assert capsys.readouterr() == ("", "")


def test_it_says_how_where_it_cannot(
    empty_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    program(empty_path, "chromium")
    assert install_chromium.missing() == ["chromedriver"]
    assert install_chromium.main() == 0
    assert "there is no apt-get here), so the test of the page will be skipped" in capsys.readouterr().err
    monkeypatch.setenv(install_chromium.REQUIRED, "1")
    assert install_chromium.main() == 1
    assert install_chromium.BY_HAND in capsys.readouterr().err


def test_it_takes_root(empty_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(empty_path, "apt-get")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert install_chromium.install() == "installing packages takes root"


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ({"update": 1, "install": 0}, None),
        ({"update": 0, "install": 100}, "apt-get install failed: E: no such package"),
    ],
)
def test_old_lists_will_do_a_failed_install_will_not(
    empty_path: Path, monkeypatch: pytest.MonkeyPatch, codes: dict[str, int], expected: str | None
) -> None:
    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        step = next(name for name in codes if name in command)
        if step == "install" and codes[step] == 0:
            for name in install_chromium.PROGRAMS:
                program(empty_path, name)
        return subprocess.CompletedProcess(command, codes[step], "", "W: old\nE: no such package\n")

    program(empty_path, "apt-get")
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr(subprocess, "run", run)
    assert install_chromium.install() == expected
