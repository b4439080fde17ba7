"""Whether the cluster that an application is sent to has room for it, and what becomes of it where there is none."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import ray

from outrider.cluster.config import ConfigError, ServingConfig
from outrider.cluster.nodes import (
    TODAYS,
    Node,
    Wanted,
    all_there_may_be,
    check_all_have_a_place,
    check_cluster_can_hold,
    check_nodes_hold_each,
    kept_together,
)

if TYPE_CHECKING:
    from outrider.deploy.app import ReplicaPlan

logger = logging.getLogger(__name__)

_ALL_THERE_MAY_BE = f"{TODAYS} and all that may come by serving.node_types"


def living_nodes() -> list[Node]:
    """Of the cluster that this process is connected to."""
    return [Node(node["Resources"], node.get("Labels") or {}) for node in ray.nodes() if node["Alive"]]


def placed(plan: ReplicaPlan, serving: ServingConfig, nodes: Sequence[Node]) -> ReplicaPlan:
    """The plan with each replica on one node, drafter and all, unless the nodes that there may be cannot hold as many
    as there are at least: the log says so then."""
    placement, why_not = kept_together(
        plan.placement,
        serving.least_replicas,
        all_there_may_be(nodes, serving.node_types, serving.least_replicas),
        others_may_come=serving.nodes_may_come and not serving.node_types,
        known=_ALL_THERE_MAY_BE if serving.node_types else TODAYS,
    )
    if why_not is not None:
        logger.warning(
            "a replica's drafter may sit on another node than its target (placement PACK, not STRICT_PACK): %s", why_not
        )
    return replace(plan, placement=placement)


def check_nodes(plan: ReplicaPlan, serving: ServingConfig, nodes: Sequence[Node]) -> None:
    """Raises ConfigError when the nodes cannot hold what has to run at once, unless others may come; and where neither
    they nor all that may come by serving.node_types could ever. What autoscaling may ask for beyond that is a warning:
    nodes may come for it then, or the log says that none will."""
    least, most = _wanted(plan, serving, "min"), _wanted(plan, serving, "max")
    if serving.node_types:
        known = [*nodes, *(Node.of(kind) for kind in serving.node_types)]
        check_nodes_hold_each(least, known, "the cluster or of serving.node_types")
    if (lacking := _lacking(least, nodes)) is not None:
        if not serving.nodes_may_come:
            raise ConfigError(lacking)
        if (never := _never_there(least, serving, nodes)) is not None:
            raise ConfigError(never)
        logger.warning("waiting for nodes, since serving.nodes_may_come is set: %s", lacking)
    if (never := _never_there(most, serving, nodes)) is not None:
        logger.warning("what may be called for at most will never all run: %s", never)
    elif lacking is None and (lacking := _lacking(most, nodes)) is not None:
        logger.warning(
            "replicas and drafters that are called for beyond today's nodes will wait for others: %s", lacking
        )


def can_surge(plan: ReplicaPlan, serving: ServingConfig, nodes: Sequence[Node]) -> bool:
    """Whether a deploy may have one replica more for a while, however many there are then: Serve would wait for its
    room without end. Raises ConfigError where the configuration wants it and there is none."""
    if serving.surge is False:
        return False
    replicas, *pool = _wanted(plan, serving, "max")
    lacking = _lacking_ever([replace(replicas, number=replicas.number + 1), *pool], serving, nodes)
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


def can_surge_drafters(plan: ReplicaPlan, serving: ServingConfig, nodes: Sequence[Node], beside_replica: bool) -> bool:
    """Whether a deploy may have one drafter of the pool more for a while. beside_replica: and one replica more, which
    the deploy has at the same time. Where there is no room drafters are replaced in place, even with serving.surge:
    targets serve without."""
    if plan.pool is None or serving.surge is False:
        return False
    replicas, pool = _wanted(plan, serving, "max")
    more = [replace(replicas, number=replicas.number + beside_replica), replace(pool, number=pool.number + 1)]
    if (lacking := _lacking_ever(more, serving, nodes)) is not None:
        logger.info("serving.surge: no room for one drafter more, so a deploy ends old ones first: %s", lacking)
    return lacking is None


def _wanted(plan: ReplicaPlan, serving: ServingConfig, end: Literal["min", "max"]) -> list[Wanted]:
    """What there always is, or what autoscaling may make of it."""
    replicas, drafters = {
        "min": (serving.least_replicas, plan.num_drafters),
        "max": (serving.most_replicas, plan.most_drafters),
    }[end]
    field = "serving.num_replicas" if serving.autoscaling is None else f"serving.autoscaling.{end}"
    of_pool = f"drafter.autoscaling.{end}" if plan.pool_is_scaled else "drafter.num_drafters"
    pool = [] if plan.pool is None else [Wanted(plan.pool, drafters, of_pool)]
    return [Wanted(plan.placement, replicas, field), *pool]


def _lacking(wanted: Sequence[Wanted], nodes: Sequence[Node]) -> str | None:
    """What the nodes lack for it."""
    try:
        check_cluster_can_hold(wanted, nodes)
    except ConfigError as error:
        return str(error)
    return None


def _lacking_ever(wanted: Sequence[Wanted], serving: ServingConfig, nodes: Sequence[Node]) -> str | None:
    """What the nodes lack for it, with all that may come."""
    lacking = _lacking(wanted, nodes)
    return _never_there(wanted, serving, nodes) if serving.nodes_may_come and lacking is not None else lacking


def _never_there(wanted: Sequence[Wanted], serving: ServingConfig, nodes: Sequence[Node]) -> str | None:
    """What all nodes that may come lack for it; None as well where nothing is known of them."""
    if not serving.node_types:
        return None
    at_most = sum(each.number * len(each.placement.bundles) for each in wanted)
    ever = all_there_may_be(nodes, serving.node_types, at_most)
    try:
        check_all_have_a_place(wanted, ever, _ALL_THERE_MAY_BE, "raise serving.node_types.max")
    except ConfigError as error:
        return str(error)
    return None
