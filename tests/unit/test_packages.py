"""What gets installed: every package under its one name, `outrider...`, with all its files."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {
    "outrider.actors": "actors",
    "outrider.cluster": "cluster",
    "outrider.deploy": "deploy",
    "outrider": "protos/outrider",
}
"""A module's path as a string, or a package's, under a name that only exists from the root of the repository."""


def packages_on_disk() -> set[str]:
    found = set()
    for name, folder in FOLDERS.items():
        for init in (ROOT / folder).rglob("__init__.py"):
            inner = init.parent.relative_to(ROOT / folder).parts
            found.add(".".join([name, *inner]))
    return found


def test_every_package_is_listed():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert set(settings["packages"]) == packages_on_disk()
    assert settings["package-dir"] == FOLDERS


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_the_wheel_has_what_the_checkout_has(tmp_path):
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", str(tmp_path)]
    source = tmp_path / "source"
    names = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    files = [name for name in names.stdout.splitlines() if (ROOT / name).is_file()]
    for name in files:  # a copy: setuptools builds beside its sources
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run([*command, str(source)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("outrider-*.whl")
    in_wheel = set(zipfile.ZipFile(wheel).namelist())
    for package, folder in FOLDERS.items():
        for name in files:
            if name.startswith(f"{folder}/") and not name.endswith(".md"):
                installed = package.replace(".", "/") + name.removeprefix(folder)
                assert installed in in_wheel, f"{name} is not in the wheel"
