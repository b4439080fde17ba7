"""How many cores a process may keep busy."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from pathlib import Path

CPU_QUOTAS = (
    ("/sys/fs/cgroup/cpu.max",),
    ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us"),
)
"""Of a container, in versions 2 and 1 of cgroups."""


def cores() -> int:
    """That this process may keep busy."""
    here = len(os.sched_getaffinity(0))
    for files in CPU_QUOTAS:
        with suppress(OSError):
            return min(here, cores_of_quota(" ".join(Path(file).read_text() for file in files)) or here)
    return here


def cores_of_quota(text: str) -> int | None:
    """text: a quota and its period, as the kernel writes them. None: no quota."""
    try:
        quota, period = map(int, text.split())
        return max(1, math.ceil(quota / period)) if quota > 0 else None
    except (ValueError, ZeroDivisionError):  # max, in version 2; -1 is version 1's
        return None
