"""Where a measurement was made, for its first line."""

from __future__ import annotations

import platform
from datetime import UTC, datetime
from pathlib import Path

from outrider.cluster.installed import VLLM, installed_version
from outrider.cluster.placement import available_cores


def machine() -> str:
    """Date, cores, processor, versions."""
    fields: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    vectors = [name for name in ("avx2", "avx512f") if name in fields.get("flags", "").split()]
    model = " ".join([fields.get("model name", platform.machine()), *vectors])
    packages = {"vLLM": VLLM, "Ray": ("ray",), "gRPC": ("grpcio",)}
    versions = ", ".join(f"{name} {installed_version(*names)}" for name, names in packages.items())
    return (
        f"{datetime.now(UTC):%d %B %Y}: {len(available_cores())} cores of {model}, "
        f"Python {platform.python_version()}, {versions}"
    )
