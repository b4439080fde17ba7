"""Which nodes hold a replica: whether a cluster has room for so many, and whether each may be kept on one node.

Pure. Nodes are told by their totals, whatever they run just now. What is found to be lacking is lacking for certain;
that nothing is does not mean that Ray finds a place at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from outrider.cluster.config import ConfigError, NodeType
from outrider.cluster.placement import Bundle, ReplicaPlacement

_UNITS = (("GPU", "GPUs"), ("CPU", "logical CPUs"))


@dataclass(frozen=True)
class Node:
    """One that is there, or that may come."""

    resources: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, kind: NodeType) -> Node:
        return cls({"CPU": kind.cpus, "GPU": kind.gpus}, kind.labels)

    def carries(self, labels: Mapping[str, str]) -> bool:
        return labels.items() <= self.labels.items()

    def room_for(self, unit: Unit) -> int:
        """How many it holds."""
        if not self.carries(unit.labels):
            return 0
        return min(int(self.resources.get(name, 0.0) // count) for name, count in unit.needs.items() if count)


@dataclass(frozen=True)
class Unit:
    """What has to sit on one node."""

    section: str
    """Of the configuration: who asks for it."""

    ranks: str
    """Whose it is, in words."""

    needs: Bundle
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def in_words(self) -> str:
        needs = " and ".join(f"{count:g} {name}s" for name, count in self.needs.items())
        return f"{needs} with {_listed(self.labels)}" if self.labels else needs


def in_words(placement: ReplicaPlacement) -> str:
    """What has to be free for it."""
    return "; ".join(f"{unit.ranks} on one node: {unit.in_words}" for unit in units_of(placement))


def units_of(placement: ReplicaPlacement) -> list[Unit]:
    """Of one replica, or of a drafter of the pool."""
    owners = [("target", placement.target_bundle_indices), ("drafter", placement.drafter_bundle_indices)]
    owned = [(section, indices) for section, indices in owners if indices]
    if placement.strategy != "STRICT_PACK":
        return [
            Unit(section, _ranks(section, len(indices)), placement.bundles[indices[0]], placement.labels[indices[0]])
            for section, indices in owned
        ]
    needs = {name: placement.total(name) for bundle in placement.bundles for name in bundle}
    labels = {key: value for each in placement.labels for key, value in each.items()}
    ranks = " and ".join(_ranks(section, len(indices)) for section, indices in owned)
    return [Unit(owned[0][0], ranks, needs, labels)]


def _ranks(section: str, number: int) -> str:
    return f"{number} {section} rank{'s' if number > 1 else ''}"


def kept_together(
    placement: ReplicaPlacement,
    num_replicas: int,
    nodes: Sequence[Node],
    types: Sequence[Node],
    *,
    nodes_may_come: bool,
) -> tuple[ReplicaPlacement, str | None]:
    """The placement with all of a replica on one node, where so many are held that way; else with its drafter wherever
    there is room, and why. types: of nodes that may come, as far as they are known."""
    if len(placement.bundles) == 1:
        return replace(placement, strategy="STRICT_PACK"), None
    apart = replace(placement, strategy="PACK")
    if (two := _contradiction(placement.labels)) is not None:
        return apart, f"target.node_labels and drafter.node_labels want another {two} each"
    together = replace(placement, strategy="STRICT_PACK")
    (whole,) = units_of(together)
    held = sum(node.room_for(whole) for node in nodes)
    if any(kind.room_for(whole) for kind in types) or held >= (1 if nodes_may_come else num_replicas):
        return together, None
    known = "the cluster's nodes and serving.node_types hold" if types else "the cluster's nodes hold"
    return apart, f"{whole.ranks} on one node need {whole.in_words} there, of which {known} {held or 'none'}"


def check_nodes_hold_a_replica(
    placement: ReplicaPlacement, pool: ReplicaPlacement | None, nodes: Sequence[Node], where: str
) -> None:
    """Raises ConfigError for what has to sit on one node and fits none of these. where: what they are, in words."""
    for unit in [*units_of(placement), *(units_of(pool) if pool is not None else [])]:
        if not any(node.carries(unit.labels) for node in nodes):
            raise ConfigError(
                f"{unit.section}.node_labels: no node of {where} has {_listed(unit.labels)}; correct it, or label one "
                "(`ray start --labels`)"
            )
        if not any(node.room_for(unit) for node in nodes):
            lower = "lower it or target.pipeline_parallel_size" if unit.section == "target" else "lower it"
            raise ConfigError(
                f"{unit.section}.tensor_parallel_size: {unit.ranks} on one node need {unit.in_words} there, which no "
                f"node of {where} has; {lower}, or add a node that does"
            )


def check_cluster_can_hold(
    placement: ReplicaPlacement,
    num_replicas: int,
    nodes: Sequence[Node],
    pool: ReplicaPlacement | None = None,
    num_drafters: int = 0,
) -> None:
    """Raise ConfigError naming what is missing, where Ray would wait for it without end.

    nodes: those that are alive. pool, num_drafters: of a pool of drafters.
    """
    for resource, unit in _UNITS:
        needed = placement.total(resource) * num_replicas
        shared = "" if pool is None else f" and a pool of {num_drafters}"
        if pool is not None:
            needed += pool.total(resource) * num_drafters
        there = sum(node.resources.get(resource, 0.0) for node in nodes)
        if needed > there:
            raise ConfigError(
                f"{_field(num_replicas)}: {num_replicas} replica{'s' if num_replicas > 1 else ''} of "
                f"{len(placement.target_bundle_indices)} target and {len(placement.drafter_bundle_indices)} drafter "
                f"ranks{shared} need{'' if num_replicas > 1 else 's'} {needed:g} {unit}, the cluster has {there:g}; "
                f"{_fix(resource)}"
            )
    check_nodes_hold_a_replica(placement, pool, nodes, "the cluster")
    counted = [(placement, num_replicas, _field(2)), *([(pool, num_drafters, "drafter.num_drafters")] if pool else [])]
    for group, number, named in counted:
        for part in units_of(group):
            if (held := sum(node.room_for(part) for node in nodes)) < number:
                raise ConfigError(
                    f"{named}: {number} times {part.ranks} on one node need {part.in_words} there, {number} times, and "
                    f"the cluster's nodes hold {held}; lower it, or add nodes that have as much"
                )


def _contradiction(labels: Sequence[Mapping[str, str]]) -> str | None:
    """A label that is to have two values."""
    found: dict[str, str] = {}
    for each in labels:
        for key, value in each.items():
            if found.setdefault(key, value) != value:
                return key
    return None


def _listed(labels: Mapping[str, str]) -> str:
    return " and ".join(f"{key}={value}" for key, value in labels.items())


def _field(num_replicas: int) -> str:
    return "serving.num_replicas" if num_replicas > 1 else "target.tensor_parallel_size"


def _fix(resource: str) -> str:
    if resource == "GPU":
        return (
            "lower the tensor_parallel_size of target or drafter, or target.pipeline_parallel_size, "
            "or add GPUs to the cluster"
        )
    return "lower it, or start Ray with more (`ray start --num-cpus`)"
