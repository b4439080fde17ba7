"""Plans the bundles of a replica's placement group, and on CPU the cores of its ranks.

Bundle 0 of a placement group holds the replica and all ranks of the target, bundle 1 the drafter. A drafter of a pool
has a group of its own. All ranks of a model share one bundle, which Ray never splits over nodes: tensor parallelism
over a network is slow. The replica shares it because Serve drains a replica by its own node alone. On CPU each rank
has a set of cores, which ``bind_to`` and ``thread_environment`` apply to its process.
"""

from __future__ import annotations

import ctypes.util
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from outrider.cluster.config import ConfigError, LookupConfig, OutriderConfig

NAMESPACE = "outrider"
"""Ray namespace of every named actor: an engine's own Ray job would otherwise get an anonymous one."""

V1_RUNNER = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
"""Environment of processes that build or run an engine. Our runners extend vLLM's V1 model runner; with Triton vLLM
would take V2."""

OWN_GPUS = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "0"}
"""Environment of an actor that uses the first GPU it sees: Ray then shows it its own GPUs only, even if the cluster's
environment says otherwise."""

REPLICA_CPUS = 1.0
"""Logical CPUs of a replica's own process."""

_KEY = "outrider_ranks"

Cores = tuple[int, ...]
Bundle = dict[str, float]


@dataclass(frozen=True)
class ReplicaPlacement:
    """Holds the bundles of one replica, as Ray takes them, and the bundle of each rank."""

    bundles: tuple[Bundle, ...]
    target_bundle_indices: tuple[int, ...]
    """Bundle of each target rank, all the same."""

    drafter_bundle_indices: tuple[int, ...]
    """Bundle of each drafter rank, all the same; empty without a drafter."""

    labels: tuple[Mapping[str, str], ...]
    """Labels that the node of each bundle must carry."""

    strategy: str
    """Ray's strategy between bundles. STRICT_PACK: one node. PACK: one node if one has room, else several."""

    def total(self, resource: str) -> float:
        """Returns the sum of one resource over the bundles."""
        return sum(bundle.get(resource, 0.0) for bundle in self.bundles)


def placement_of(config: OutriderConfig, core_plan: CorePlan | None) -> ReplicaPlacement:
    """Returns the bundles of a target replica, with its drafter's if it has one of its own.

    On GPU (core_plan None) a rank counts for one GPU and one CPU; an n-gram or suffix drafter needs no GPU, and
    co-located drafting no bundle. On CPU a rank counts for the cores of its set.
    """
    target, drafter = _bundles(config, core_plan)
    remote = config.remote_drafter
    owned = remote if remote is not None and not remote.pooled else None
    return ReplicaPlacement(
        bundles=({**target, "CPU": target["CPU"] + REPLICA_CPUS}, *([drafter] if owned else [])),
        target_bundle_indices=(0,) * config.target.num_ranks,
        drafter_bundle_indices=(1,) * (owned.tensor_parallel_size if owned else 0),
        labels=(config.target.node_labels, *([owned.node_labels] if owned else [])),
        strategy="PACK",
    )


def pool_placement_of(config: OutriderConfig, core_plan: CorePlan | None) -> ReplicaPlacement | None:
    """Returns the bundles of a replica of the drafter pool, or None without a pool."""
    remote = config.remote_drafter
    if remote is None or not remote.pooled:
        return None
    drafter = _bundles(config, core_plan)[1]
    indices = (1,) * remote.tensor_parallel_size
    return ReplicaPlacement(({"CPU": REPLICA_CPUS}, drafter), (), indices, (remote.node_labels,) * 2, "STRICT_PACK")


def _bundles(config: OutriderConfig, core_plan: CorePlan | None) -> tuple[Bundle, Bundle]:
    """Returns the resources of all target ranks, and of all drafter ranks."""
    if core_plan is not None:
        return {"CPU": float(sum(map(len, core_plan.target)))}, {"CPU": float(sum(map(len, core_plan.drafter)))}
    ranks, remote = float(config.target.num_ranks), config.remote_drafter
    drafters = 1.0 if remote is None else float(remote.tensor_parallel_size)
    gpus = {} if isinstance(remote, LookupConfig) else {"GPU": drafters}
    return {"GPU": ranks, "CPU": ranks}, {**gpus, "CPU": drafters}


@dataclass(frozen=True)
class RankPlacement:
    """Maps rank i to the Ray actor actor_names[i] on bundle bundle_indices[i], bound to cores[i] (CPU only)."""

    ray_address: str
    """GCS address, by which an engine core, a process of its own, finds the Ray cluster."""

    actor_names: list[str]
    bundle_indices: list[int]
    cores: list[list[int]] | None = None
    env_vars: dict[str, str] = field(default_factory=dict)
    """Environment of each rank's process, set before torch is loaded."""

    def as_additional_config(self) -> dict[str, Any]:
        """Returns it as an entry of vLLM's ``additional_config``."""
        return {_KEY: asdict(self)}

    @classmethod
    def of(cls, vllm_config: Any) -> RankPlacement:
        return cls(**vllm_config.additional_config[_KEY])


@dataclass(frozen=True)
class CorePlan:
    """Holds one set of cores for each rank, in rank order."""

    target: tuple[Cores, ...]
    drafter: tuple[Cores, ...] = ()
    """Empty without a drafter."""

    warnings: tuple[str, ...] = ()
    """Warnings for the operator about cores that several ranks share."""


def available_cores() -> Cores:
    """Returns the ids of the CPU cores that this process may use."""
    return tuple(sorted(os.sched_getaffinity(0)))


def plan_cores(config: OutriderConfig, available: Sequence[int]) -> CorePlan:
    """Divides the available core ids between target and drafter ranks.

    Explicit ``cores`` are taken as they are; the other side gets the rest. Otherwise a rank of a draft model gets as
    many cores as one of the target, and an n-gram or suffix drafter gets the last core. If there are more ranks than
    cores, they share them round robin, and the plan has a warning.

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
    target_ranks = config.target.num_ranks
    drafter_ranks = drafter.tensor_parallel_size if drafter else 0
    warnings: list[str] = []

    if taken := _union(explicit_target) | _union(explicit_drafter):
        free = tuple(core for core in cores if core not in taken)
        planned = bool(explicit_target) and (bool(explicit_drafter) or drafter is None)
        if not free and not planned:
            who = "drafter" if explicit_target else "target"
            warnings.append(f"no core is left for the {who}, which shares them all: both sides slow down")
        free = free or cores
        return CorePlan(
            explicit_target or _split(free, target_ranks, "target", warnings),
            explicit_drafter or (_split(free, drafter_ranks, "drafter", warnings) if drafter else ()),
            tuple(warnings),
        )
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


def _split(cores: Cores, ranks: int, who: str, warnings: list[str]) -> tuple[Cores, ...]:
    """Returns contiguous runs of cores, of equal length but for one core more in the first ones."""
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
    """Returns the installed libraries to preload before torch is loaded, as LD_PRELOAD takes them.

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


_HUGE_PAGES = "glibc.malloc.hugetlb=1"
"""malloc asks for transparent huge pages, which Linux gives most programs only where they ask (`madvise`). A step reads
all weights once, and with pages of 4 KB one core spends an eighth of it looking up where they are. Of no effect before
glibc 2.35, and under tcmalloc."""


def thread_environment(cores: Sequence[int]) -> dict[str, str]:
    """Returns environment variables for a process that will be bound to cores, to be set before it starts.

    They name no core, so ranks with equally many cores may share them; OpenMP's threads inherit the mask that
    ``bind_to`` sets. The KMP values are those that vLLM's own launcher sets.
    """
    tunables = [entry for entry in os.environ.get("GLIBC_TUNABLES", "").split(":") if entry]
    environment = {
        "OMP_NUM_THREADS": str(len(cores)),
        "GLIBC_TUNABLES": ":".join([_HUGE_PAGES, *tunables]),  # of two settings of one tunable the last counts
    }
    libraries = preload_libraries()
    inherited = [entry for entry in os.environ.get("LD_PRELOAD", "").replace(" ", ":").split(":") if entry]
    if preload := list(dict.fromkeys([*inherited, *libraries])):
        environment["LD_PRELOAD"] = ":".join(preload)
    if any("libiomp" in library for library in libraries):
        environment["KMP_BLOCKTIME"] = "5"
        environment["KMP_TPAUSE"] = "0"
    return environment


def rank_environment(cores_by_rank: Sequence[Sequence[int]] | None) -> dict[str, str]:
    """Returns one environment for all ranks of an engine, by the smallest set of cores. Empty on GPU (None)."""
    return {} if cores_by_rank is None else thread_environment(min(cores_by_rank, key=len))


def float32_environment(*dtypes: str) -> dict[str, str]:
    """Returns the environment of processes that run engines of these dtypes.

    vLLM's attention in float32 runs in Triton on a GPU, and Triton multiplies float32 as TF32 by default. An operator's
    own value is kept. With "auto" vLLM runs a float32 checkpoint in bfloat16 or float16.
    """
    if "float32" not in dtypes:
        return {}
    return {"TRITON_F32_DEFAULT": os.environ.get("TRITON_F32_DEFAULT", "ieee")}


def bind_to(cores: Sequence[int]) -> None:
    """Binds every thread of this process, and all threads that start later, to cores.

    Call before the first parallel region. Raises OSError when none of the cores may be used.
    """
    os.sched_setaffinity(0, cores)
    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(thread), cores)
        except ProcessLookupError:
            continue  # ended since it was listed
