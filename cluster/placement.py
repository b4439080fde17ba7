"""Where a replica's processes run: the bundles of its placement group, what ranks are called, and their CPU cores.

Bundle 0 of a placement group is that of the replica itself and of all the target's ranks, bundle 1 the drafter's; a
drafter of a pool has a group of its own. All ranks of a model, those of all its pipeline stages, share one bundle,
because Ray never splits one over nodes, where tensor parallelism is worth nothing. The replica sits with them because
Serve looks at its node alone: when that one is drained, the ranks' is. Ray chooses the nodes. On CPU each rank has a
set of cores, which ``bind_to`` and ``thread_environment`` apply to its process.
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
"""Environment of whoever builds or runs an engine: our runners extend vLLM's V1 model runner, and with Triton vLLM
would take V2."""

OWN_GPUS = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "0"}
"""Environment of an actor that runs on the first GPU that it sees. It makes Ray show the actor its own GPUs only, also
where the cluster's environment says "1"."""

REPLICA_CPUS = 1.0
"""Logical, of a replica's own process."""

_KEY = "outrider_ranks"

Cores = tuple[int, ...]
Bundle = dict[str, float]


@dataclass(frozen=True)
class ReplicaPlacement:
    """Bundles of one replica, as Ray takes them, and who sits on which."""

    bundles: tuple[Bundle, ...]
    target_bundle_indices: tuple[int, ...]
    """By target rank, all the same."""

    drafter_bundle_indices: tuple[int, ...]
    """By drafter rank, all the same; empty without a drafter."""

    labels: tuple[Mapping[str, str], ...]
    """By bundle: what the node has to carry."""

    strategy: str
    """Between bundles. STRICT_PACK: all on one node. PACK: on one node where one has room, else on several."""

    def total(self, resource: str) -> float:
        """Sum of one resource over the bundles."""
        return sum(bundle.get(resource, 0.0) for bundle in self.bundles)


def placement_of(config: OutriderConfig, core_plan: CorePlan | None) -> ReplicaPlacement:
    """Bundles of a target replica, its drafter's among them where it has one of its own.

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
    """Bundles of a replica of the pool, on one node; None: the configuration has no pool."""
    remote = config.remote_drafter
    if remote is None or not remote.pooled:
        return None
    drafter = _bundles(config, core_plan)[1]
    indices = (1,) * remote.tensor_parallel_size
    return ReplicaPlacement(({"CPU": REPLICA_CPUS}, drafter), (), indices, (remote.node_labels,) * 2, "STRICT_PACK")


def _bundles(config: OutriderConfig, core_plan: CorePlan | None) -> tuple[Bundle, Bundle]:
    """Of all of the target's ranks, and of all of the drafter's."""
    if core_plan is not None:
        return {"CPU": float(sum(map(len, core_plan.target)))}, {"CPU": float(sum(map(len, core_plan.drafter)))}
    ranks, remote = float(config.target.num_ranks), config.remote_drafter
    drafters = 1.0 if remote is None else float(remote.tensor_parallel_size)
    gpus = {} if isinstance(remote, LookupConfig) else {"GPU": drafters}
    return {"GPU": ranks, "CPU": ranks}, {**gpus, "CPU": drafters}


@dataclass(frozen=True)
class RankPlacement:
    """Rank i is the Ray actor actor_names[i] on bundle bundle_indices[i], bound to cores[i] (CPU only)."""

    ray_address: str
    """GCS address: an engine core is a process of its own and must find the same Ray cluster."""

    actor_names: list[str]
    bundle_indices: list[int]
    cores: list[list[int]] | None = None
    env_vars: dict[str, str] = field(default_factory=dict)
    """Environment of every rank's process, set before torch loads."""

    def as_additional_config(self) -> dict[str, Any]:
        """The form in which it rides in vLLM's ``additional_config``."""
        return {_KEY: asdict(self)}

    @classmethod
    def of(cls, vllm_config: Any) -> RankPlacement:
        return cls(**vllm_config.additional_config[_KEY])


@dataclass(frozen=True)
class CorePlan:
    """One set of cores per rank, in rank order. Both tuples hold as many as the config has ranks."""

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
    target_ranks = config.target.num_ranks
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


_HUGE_PAGES = "glibc.malloc.hugetlb=1"
"""malloc asks for transparent huge pages, which Linux gives most programs only where they ask (`madvise`). A step reads
all weights once, and with pages of 4 KB one core spends an eighth of it looking up where they are. Of no effect before
glibc 2.35, and under tcmalloc."""


def thread_environment(cores: Sequence[int]) -> dict[str, str]:
    """Environment variables for a process bound to ``cores``, to be set before it starts.

    Holds nothing that names a core, so ranks of equal size may share one environment: ``bind_to`` pins each of
    them, and OpenMP's threads inherit that mask. The KMP values are those vLLM's own launcher sets.
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
    """One environment for all ranks of an engine, sized for the smallest set of cores. Empty on GPU (None)."""
    return {} if cores_by_rank is None else thread_environment(min(cores_by_rank, key=len))


def float32_environment(*dtypes: str) -> dict[str, str]:
    """Returns the environment of processes that run engines of these dtypes.

    vLLM's attention in float32 runs in Triton on a GPU, and Triton multiplies float32 as TF32 by default. A value that
    the operator has set stands. With "auto" vLLM runs a float32 checkpoint in bfloat16 or float16.
    """
    if "float32" not in dtypes:
        return {}
    return {"TRITON_F32_DEFAULT": os.environ.get("TRITON_F32_DEFAULT", "ieee")}


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
