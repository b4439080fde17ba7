"""Which CPU cores each rank of a replica runs on.

On CPU a rank's bundle is a set of cores. Planning is pure; ``bind_to`` and ``thread_environment`` apply a plan
to one process. Core ids are the operating system's.
"""

from __future__ import annotations

import ctypes.util
import logging
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from cluster.config import ConfigError, LookupConfig, OutriderConfig

logger = logging.getLogger(__name__)

Cores = tuple[int, ...]


@dataclass(frozen=True)
class CorePlan:
    """One set of cores per rank, in rank order. Both tuples hold the config's tensor_parallel_size entries."""

    target: tuple[Cores, ...]
    drafter: tuple[Cores, ...] = ()
    """Empty without a drafter."""

    warnings: tuple[str, ...] = ()
    """What the operator should know: cores that several ranks have to share."""


def available_cores() -> Cores:
    """The cores this process may use."""
    return tuple(sorted(os.sched_getaffinity(0)))


def plan_cores(config: OutriderConfig, available: Sequence[int]) -> CorePlan:
    """Share ``available`` core ids between target and drafter ranks.

    Explicit ``cores`` are taken as they are; the other side gets what they leave. Otherwise a model drafter's
    ranks get as many cores each as the target's, and an n-gram or suffix drafter, which only searches, gets the last
    one. Co-located drafting is the target ranks' own work.
    Where ranks outnumber cores they share them round robin, and the plan carries a warning.

    Raises ConfigError for an explicit core that is not available or that both sides claim.
    """
    cores = tuple(sorted(set(available)))
    if not cores:
        raise ConfigError("target.cores: this process may use no CPU core; check its affinity mask")
    drafter = config.remote_drafter
    explicit_target = _explicit(config.target.cores, "target.cores", cores)
    explicit_drafter = _explicit(drafter.cores if drafter else None, "drafter.cores", cores)
    if shared := _union(explicit_target) & _union(explicit_drafter):
        raise ConfigError(
            f"drafter.cores: {_listed(shared)} also in target.cores; give target and drafter different cores, "
            "or leave one of the two out"
        )
    target_ranks = config.target.tensor_parallel_size
    drafter_ranks = drafter.tensor_parallel_size if drafter else 0
    warnings: list[str] = []

    if explicit_target and (explicit_drafter or not drafter):
        return CorePlan(explicit_target, explicit_drafter)
    if explicit_target:
        rest = _left(cores, explicit_target, "drafter", warnings)
        return CorePlan(explicit_target, _split(rest, drafter_ranks, "drafter", warnings), tuple(warnings))
    if explicit_drafter:
        rest = _left(cores, explicit_drafter, "target", warnings)
        return CorePlan(_split(rest, target_ranks, "target", warnings), explicit_drafter, tuple(warnings))
    if isinstance(drafter, LookupConfig):
        rest = cores[:-1] if len(cores) > target_ranks else cores
        if rest == cores:
            warnings.append(
                f"the {drafter.method} drafter shares core {cores[-1]} with the target: {len(cores)} cores in all"
            )
        return CorePlan(_split(rest, target_ranks, "target", warnings), (cores[-1:],), tuple(warnings))
    sets = _split(cores, target_ranks + drafter_ranks, "target and drafter" if drafter else "target", warnings)
    return CorePlan(sets[:target_ranks], sets[target_ranks:], tuple(warnings))


def _explicit(sets: list[list[int]] | None, field: str, available: Cores) -> tuple[Cores, ...]:
    if sets is None:
        return ()
    wanted = tuple(tuple(sorted(set(cores))) for cores in sets)
    if missing := _union(wanted) - set(available):
        raise ConfigError(f"{field}: {_listed(missing)} not available here; this process may use {_listed(available)}")
    return wanted


def _left(available: Cores, taken: tuple[Cores, ...], who: str, warnings: list[str]) -> Cores:
    rest = tuple(core for core in available if core not in _union(taken))
    if rest:
        return rest
    warnings.append(f"no core is left for the {who}, which shares them all: both sides slow down")
    return available


def _split(cores: Cores, ranks: int, who: str, warnings: list[str]) -> tuple[Cores, ...]:
    """Contiguous runs of equal length, the first ones a core longer where it does not come out even."""
    if len(cores) < ranks:
        warnings.append(
            f"{ranks} {who} ranks share {len(cores)} core{'s' if len(cores) > 1 else ''} round robin: ranks that wait "
            "for each other on one core are many times slower; lower tensor_parallel_size, or use a larger machine"
        )
        return tuple((cores[rank % len(cores)],) for rank in range(ranks))
    size, extra = divmod(len(cores), ranks)
    ends = [size * (rank + 1) + min(rank + 1, extra) for rank in range(ranks)]
    return tuple(cores[start:end] for start, end in zip([0, *ends], ends, strict=False))


def _union(sets: Iterable[Cores]) -> set[int]:
    return {core for cores in sets for core in cores}


def _listed(cores: Iterable[int]) -> str:
    ids = sorted(cores)
    return f"core{'s' if len(ids) > 1 else ''} {', '.join(map(str, ids))}"


@lru_cache
def preload_libraries() -> tuple[str, ...]:
    """Those libraries worth preloading before torch loads that are installed, as LD_PRELOAD takes them.

    Intel's OpenMP runtime (from the intel-openmp package, which installs into the environment's lib directory) and
    tcmalloc together speed CPU decoding by a quarter.
    """
    found: list[str] = []
    if (openmp := Path(sys.prefix) / "lib" / "libiomp5.so").exists():
        found.append(str(openmp))
    for name in ("tcmalloc_minimal", "tcmalloc"):
        if library := ctypes.util.find_library(name):
            found.append(library)
            break
    return tuple(found)


def thread_environment(cores: Sequence[int]) -> dict[str, str]:
    """Environment variables for a process bound to ``cores``, to be set before it starts.

    Holds nothing that names a core, so ranks of equal size may share one environment: ``bind_to`` pins each of
    them, and OpenMP's threads inherit that mask. The KMP values are those vLLM's own launcher sets.
    """
    environment = {"OMP_NUM_THREADS": str(len(cores))}
    libraries = preload_libraries()
    inherited = [entry for entry in os.environ.get("LD_PRELOAD", "").replace(" ", ":").split(":") if entry]
    if preload := list(dict.fromkeys([*inherited, *libraries])):
        environment["LD_PRELOAD"] = ":".join(preload)
    if any("libiomp" in library for library in libraries):
        environment["KMP_BLOCKTIME"] = "5"
        environment["KMP_TPAUSE"] = "0"
    return environment


def rank_environment(cores_by_rank: Sequence[Sequence[int]] | None) -> dict[str, str]:
    """One environment for all ranks of an engine, sized for the smallest set of cores. Empty on GPU (None)."""
    return {} if cores_by_rank is None else thread_environment(min(cores_by_rank, key=len))


def bind_to(cores: Sequence[int]) -> None:
    """Bind every thread of this process to ``cores``, and with them all threads started later.

    Call before the first parallel region. Raises OSError when none of the cores may be used.
    """
    os.sched_setaffinity(0, cores)
    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(thread), cores)
        except ProcessLookupError:
            continue  # ended since it was listed
