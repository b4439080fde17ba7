"""Registers the emulated model with vLLM, in every process it starts.

vLLM calls the entry points of the group ``vllm.general_plugins`` in each of its processes: its own front end, the
engine core, workers, Ray actors, and the short-lived one that inspects a model class. An entry point needs the metadata
of a distribution, and Python looks for that on its whole path: a directory with two small files, put on PYTHONPATH, is
enough, and every child process inherits it. Nothing is installed. The directory also has a link to this package, and
nothing else of this tree: what is measured may be another tree's code.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.bench.emulation.checkpoint import ARCHITECTURE

DISTRIBUTION = "outrider-emulation"
PACKAGE = Path(__file__).parent


def register() -> None:
    """The entry point. By name, so that only a process that loads the model imports it."""
    from vllm import ModelRegistry

    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(ARCHITECTURE, f"tests.bench.emulation.model:{ARCHITECTURE}")


def write_distribution(directory: Path) -> Path:
    """Write the metadata of a distribution that registers the model, and a link to its package. Returns directory."""
    metadata = directory / f"{DISTRIBUTION.replace('-', '_')}-0.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(
        f"[vllm.general_plugins]\n{DISTRIBUTION} = {register.__module__}:{register.__name__}\n"
    )
    # A package, so that no other tree's `tests` is taken for it.
    link = directory.joinpath(*__name__.split(".")[:-1])
    link.parent.mkdir(parents=True, exist_ok=True)
    (directory / "tests" / "__init__.py").touch()
    if not link.exists():
        link.symlink_to(PACKAGE.resolve(), target_is_directory=True)
    return directory


def environment(directory: Path) -> dict[str, str]:
    """What a process needs to find the model, and all it starts. Run it elsewhere than in a tree's root: a directory
    that Python is started in comes before these."""
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    added = str(write_distribution(directory).resolve())
    return {"PYTHONPATH": os.pathsep.join([added, *(path for path in inherited if path and path != added)])}


def install(directory: Path) -> None:
    """Make this process and all it starts from now on find the model. Call before vLLM is imported."""
    os.environ.update(environment(directory))
    sys.path.insert(0, str(directory.resolve()))
