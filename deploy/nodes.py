"""Whether the cluster that an application is sent to has room for it, and what becomes of it where there is none."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import ray

from outrider.cluster.config import ConfigError, ServingConfig
from outrider.cluster.nodes import Node, check_cluster_can_hold, check_nodes_hold_a_replica, kept_together

if TYPE_CHECKING:
    from outrider.deploy.app import ReplicaPlan

logger = logging.getLogger(__name__)


def living_nodes() -> list[Node]:
    """Of the cluster that this process is connected to."""
    return [Node(node["Resources"], node.get("Labels") or {}) for node in ray.nodes() if node["Alive"]]


def placed(plan: ReplicaPlan, serving: ServingConfig, nodes: Sequence[Node]) -> ReplicaPlan:
    """The plan with each replica on one node, drafter and all, unless no node can hold it: the log says so then."""
    types = [Node.of(kind) for kind in serving.node_types]
    placement, why_not = kept_together(
        plan.placement, serving.least_replicas, nodes, types, nodes_may_come=serving.nodes_may_come
    )
    if why_not is not None:
        logger.warning(
            "a replica's drafter may sit on another node than its target (placement PACK, not STRICT_PACK): %s", why_not
        )
    return replace(plan, placement=placement)


def check_nodes(plan: ReplicaPlan, serving: ServingConfig, nodes: Sequence[Node]) -> None:
    """Raises ConfigError when the nodes cannot hold what has to run at once, unless others may come; and where neither
    they nor any that may come could ever. What autoscaling may ask for beyond that is a warning: nodes may come for it
    then."""
    if serving.node_types:
        known = [*nodes, *(Node.of(kind) for kind in serving.node_types)]
        check_nodes_hold_a_replica(plan.placement, plan.pool, known, "the cluster or of serving.node_types")
    least_field, most_field = _fields(serving)
    least = _lacking(plan, serving.least_replicas, plan.num_drafters, nodes, least_field)
    if least is not None:
        if not serving.nodes_may_come:
            raise ConfigError(least)
        logger.warning("waiting for nodes, since serving.nodes_may_come is set: %s", least)
    elif most := _lacking(plan, serving.most_replicas, plan.num_drafters, nodes, most_field):
        logger.warning("replicas that are called for beyond today's nodes will wait for others: %s", most)


def can_surge(plan: ReplicaPlan, serving: ServingConfig, nodes: Sequence[Node]) -> bool:
    """Whether a deploy may have one replica more for a while, however many there are then: Serve would wait for its
    room without end. Raises ConfigError where the configuration wants it and there is none."""
    if serving.surge is False:
        return False
    field = _fields(serving)[1]
    lacking = _lacking(plan, serving.most_replicas + 1, plan.most_drafters, nodes, field)
    if serving.nodes_may_come and lacking is not None:
        most = _most_nodes(serving)
        lacking = None if most is None else _lacking(plan, serving.most_replicas + 1, plan.most_drafters, most, field)
    if lacking is None:
        return True
    if serving.surge:
        fix = "raise serving.node_types.max" if serving.nodes_may_come else "add nodes, set serving.nodes_may_come"
        raise ConfigError(
            f"serving.surge: a deploy takes one replica more for a while, and {lacking.partition('; ')[0]}; {fix}, or "
            "leave surge out"
        )
    logger.info("serving.surge: there is no room for one replica more, so a deploy ends old ones first: %s", lacking)
    return False


def _most_nodes(serving: ServingConfig) -> list[Node] | None:
    """That there may be; None: not known."""
    kinds = [(Node.of(kind), kind.max) for kind in serving.node_types]
    if not kinds or any(number is None for _, number in kinds):
        return None
    return [node for node, number in kinds for _ in range(number or 0)]


def _fields(serving: ServingConfig) -> tuple[str, str]:
    """What says how many replicas there are at least, and at most."""
    if serving.autoscaling is None:
        return "serving.num_replicas", "serving.num_replicas"
    return "serving.autoscaling.min", "serving.autoscaling.max"


def _lacking(plan: ReplicaPlan, replicas: int, drafters: int, nodes: Sequence[Node], field: str) -> str | None:
    """What the nodes lack for so many. field: where their number is said."""
    try:
        check_cluster_can_hold(plan.placement, replicas, nodes, plan.pool, drafters)
    except ConfigError as error:
        return str(error).replace("serving.num_replicas", field)
    return None
