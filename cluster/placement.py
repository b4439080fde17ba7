"""The placement group of one replica: bundle 0 is the replica's own, then the target's ranks, then the drafter's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cluster.config import ConfigError, LookupConfig, OutriderConfig
from cluster.cores import CorePlan

Bundle = dict[str, float]


@dataclass(frozen=True)
class ReplicaPlacement:
    """Bundles of one replica, as Ray takes them, and who sits on which."""

    bundles: tuple[Bundle, ...]
    target_bundle_indices: tuple[int, ...]
    """By target rank; rank 0 is the verifier."""

    drafter_bundle_indices: tuple[int, ...]
    """By drafter rank; empty without a drafter."""

    strategy: str = "PACK"

    def total(self, resource: str) -> float:
        """Sum of one resource over the bundles."""
        return sum(bundle.get(resource, 0.0) for bundle in self.bundles)


def placement_of(config: OutriderConfig, on_gpu: bool, core_plan: CorePlan | None = None) -> ReplicaPlacement:
    """Bundles for ``config``.

    On GPU every rank of a model gets one GPU and one CPU; an n-gram or suffix drafter needs no GPU, and co-located
    drafting no bundle. On CPU a rank's bundle counts the cores of its set in ``core_plan``, which is then required.
    """
    ranks = config.target.tensor_parallel_size
    remote = config.remote_drafter
    drafter_ranks = remote.tensor_parallel_size if remote else 0
    if on_gpu:
        target = [_gpu_bundle()] * ranks
        drafter = [{"CPU": 1.0} if isinstance(remote, LookupConfig) else _gpu_bundle()] * drafter_ranks
    else:
        if core_plan is None:
            raise ValueError("placement on CPU needs a core plan")
        target = [{"CPU": float(len(cores))} for cores in core_plan.target]
        drafter = [{"CPU": float(len(cores))} for cores in core_plan.drafter]
        assert (len(target), len(drafter)) == (ranks, drafter_ranks), "the core plan belongs to another configuration"
    bundles = ({"CPU": 1.0}, *(dict(bundle) for bundle in [*target, *drafter]))
    return ReplicaPlacement(
        bundles=bundles,
        target_bundle_indices=tuple(range(1, 1 + ranks)),
        drafter_bundle_indices=tuple(range(1 + ranks, 1 + ranks + drafter_ranks)),
    )


def _gpu_bundle() -> Bundle:
    return {"GPU": 1.0, "CPU": 1.0}


def check_cluster_can_hold(
    placement: ReplicaPlacement, num_replicas: int, cluster_resources: Mapping[str, float]
) -> None:
    """Raise ConfigError naming what is missing, where Ray would wait for it without end.

    cluster_resources: what ``ray.cluster_resources()`` returns.
    """
    for resource, unit in (("GPU", "GPUs"), ("CPU", "logical CPUs")):
        needed = placement.total(resource) * num_replicas
        there = cluster_resources.get(resource, 0.0)
        if needed > there:
            raise ConfigError(
                f"{_field(resource, num_replicas)}: {num_replicas} replica{'s' if num_replicas > 1 else ''} of "
                f"{len(placement.target_bundle_indices)} target and {len(placement.drafter_bundle_indices)} drafter "
                f"ranks need{'' if num_replicas > 1 else 's'} {needed:g} {unit}, the cluster has {there:g}; "
                f"{_fix(resource)}"
            )


def _field(resource: str, num_replicas: int) -> str:
    return "serving.num_replicas" if num_replicas > 1 else "target.tensor_parallel_size"


def _fix(resource: str) -> str:
    if resource == "GPU":
        return "lower the tensor_parallel_size of target or drafter, or add GPUs to the cluster"
    return "lower it, or start Ray with more (`ray start --num-cpus`)"
