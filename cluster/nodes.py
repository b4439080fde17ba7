"""Which nodes hold a replica: whether a cluster has room for so many, and whether each may be kept on one node.

Pure. Nodes are told by their totals, whatever they run just now. What is found to be lacking is lacking for certain:
where nothing is, all have a place together, which does not mean that Ray finds it at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from outrider.cluster.config import ConfigError, NodeType
from outrider.cluster.head import HEAD_RESOURCE
from outrider.cluster.placement import Bundle, ReplicaPlacement

TODAYS = "the cluster's nodes"
"""In words."""


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

    def is_a(self, kind: Node) -> bool:
        """Whether it may have come as one. The head never has."""
        same = all(self.resources.get(name, 0.0) == count for name, count in kind.resources.items())
        return same and self.carries(kind.labels) and HEAD_RESOURCE not in self.resources

    def room_for(self, unit: Unit) -> int:
        """How many it holds."""
        if not self.carries(unit.labels):
            return 0
        return min(int(self.resources.get(name, 0.0) // count) for name, count in unit.needs.items() if count)

    def without(self, unit: Unit, number: int) -> Node:
        """What is left of it beside so many."""
        taken = {name: self.resources.get(name, 0.0) - number * count for name, count in unit.needs.items()}
        return replace(self, resources={**self.resources, **taken})


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
        needs = " and ".join(f"{count:g} {name}{'s' if count != 1 else ''}" for name, count in self.needs.items())
        return f"{needs} with {_listed(self.labels)}" if self.labels else needs


@dataclass(frozen=True)
class Wanted:
    """Replicas, or drafters of a pool, that there have to be at once."""

    placement: ReplicaPlacement
    number: int
    field: str
    """Of the configuration: what says the number."""


def all_there_may_be(nodes: Sequence[Node], types: Sequence[NodeType], at_most: int) -> list[Node]:
    """Today's nodes, and those of each kind that may still come: ``max`` less those of today that are of the kind, the
    one with most labels where a node is of several. at_most: more of a kind are of no use; as many come where its
    ``max`` is not known."""
    kinds = sorted(types, key=lambda kind: -len(kind.labels))
    to_come = [math.inf if kind.max is None else kind.max for kind in kinds]
    for node in nodes:
        for index, kind in enumerate(kinds):
            if to_come[index] and node.is_a(Node.of(kind)):
                to_come[index] -= 1
                break
    coming = zip(kinds, to_come, strict=True)
    return [*nodes, *(Node.of(kind) for kind, number in coming for _ in range(int(min(number, at_most))))]


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
    *,
    others_may_come: bool,
    known: str = TODAYS,
) -> tuple[ReplicaPlacement, str | None]:
    """The placement with all of a replica on one node, where so many are held that way; else with its drafter wherever
    there is room, and why. nodes: all there may be; others_may_come: and some of which nothing is known, then one that
    holds a replica is enough. known: what the nodes are, in words."""
    if len(placement.bundles) == 1:
        return replace(placement, strategy="STRICT_PACK"), None
    apart = replace(placement, strategy="PACK")
    if (two := _contradiction(placement.labels)) is not None:
        return apart, f"target.node_labels and drafter.node_labels want another {two} each"
    together = replace(placement, strategy="STRICT_PACK")
    (whole,) = units_of(together)
    held = sum(node.room_for(whole) for node in nodes)
    if held >= (1 if others_may_come else num_replicas):
        return together, None
    return apart, f"{whole.ranks} on one node need {whole.in_words} there, of which {known} hold {held or 'none'}"


def most_beside(other: Unit, number: int, unit: Unit, nodes: Sequence[Node]) -> int:
    """The most of a unit that nodes hold beside so many of another; 0 where they do not hold those either.

    Exact: node after node, for each number of the others that have a place so far, the most units that have one too.
    """
    most = np.full(number + 1, -np.inf)
    most[0] = 0
    for node in nodes:
        beside = [node.without(other, there).room_for(unit) for there in range(min(node.room_for(other), number) + 1)]
        with_node = most + beside[0]
        for there, room in enumerate(beside[1:], start=1):
            np.maximum(with_node[there:], most[:-there] + room, out=with_node[there:])
        most = with_node
    return int(max(most[number], 0))


def check_nodes_hold_each(wanted: Sequence[Wanted], nodes: Sequence[Node], where: str) -> None:
    """Raises ConfigError for what has to sit on one node and fits none of these. where: what they are, in words."""
    for unit in (unit for each in wanted for unit in units_of(each.placement)):
        if unit.labels and not any(node.carries(unit.labels) for node in nodes):
            raise ConfigError(
                f"{unit.section}.node_labels: no node of {where} has {_listed(unit.labels)}; correct it, or label one "
                "(`ray start --labels`)"
            )
        if not any(node.room_for(unit) for node in nodes):
            lower = "lower it or target.pipeline_parallel_size" if unit.section == "target" else "lower it"
            raise ConfigError(
                f"{unit.section}.tensor_parallel_size: {unit.ranks} on one node need {unit.in_words} there, which no "
                f"node of {where} has; {lower}, or add a node that does (`ray start --num-gpus`, `--num-cpus`)"
            )


def check_all_have_a_place(
    wanted: Sequence[Wanted], nodes: Sequence[Node], known: str = TODAYS, fix: str = "add nodes that have as much"
) -> None:
    """Raises ConfigError for what these nodes do not hold so many times, beside what is before it: a target and a
    drafter, at most. known: what they are, in words."""
    before: tuple[Unit, int] | None = None
    for each in wanted:
        again = f", {each.number} times" if each.number > 1 else ""
        for unit in units_of(each.placement):
            held, beside = sum(node.room_for(unit) for node in nodes), ""
            if before is not None and held >= each.number:
                held = most_beside(*before, unit, nodes)
                beside = f"beside {_times(before[1], before[0])} "
            if held < each.number:
                named = each.field if each.number > 1 else f"{unit.section}.tensor_parallel_size"
                raise ConfigError(
                    f"{named}: {_times(each.number, unit)} on one node need {unit.in_words} there{again}, and "
                    f"{beside}{known} hold {held or 'none'}; lower it, or {fix}"
                )
            before = (unit, each.number)


def check_cluster_can_hold(wanted: Sequence[Wanted], nodes: Sequence[Node]) -> None:
    """Raises ConfigError naming what is missing, where Ray would wait for it without end.

    wanted: replicas, and the drafters of a pool after them. nodes: those that are alive.
    """
    check_nodes_hold_each(wanted, nodes, "the cluster")
    check_all_have_a_place(wanted, nodes)


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


def _times(number: int, unit: Unit) -> str:
    return unit.ranks if number == 1 else f"{number} times {unit.ranks}"
