"""What Serve is asked for when a configuration is deployed."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.cluster.config import parse_config
from outrider.deploy.app import TAKE_DOWN_S, build_app, plan_replica

DRAIN_S = 77.0


@pytest.fixture(scope="module")
def deployments() -> dict[str, Any]:
    """By name: the deployments of an application, Ingress first, as Serve would get them."""
    config = parse_config({"target": {"model": "t"}, "drafter": {"method": "ngram"}, "serving": {"drain_s": DRAIN_S}})
    ingress = build_app(config, plan_replica(config))._bound_deployment
    (target,) = (arg._bound_deployment for arg in ingress.init_args if hasattr(arg, "_bound_deployment"))
    return {bound.name: bound for bound in (ingress, target)}


@pytest.mark.parametrize("name", ["Ingress", "Target"])
def test_a_replica_that_is_taken_down_may_finish_what_it_has_begun(deployments: dict[str, Any], name: str) -> None:
    config = deployments[name]._deployment_config
    assert config.graceful_shutdown_timeout_s == DRAIN_S + TAKE_DOWN_S, "Serve kills it then, its engine's end included"
    assert 0 < config.graceful_shutdown_wait_loop_s <= TAKE_DOWN_S / 5


def test_health_is_not_judged_by_one_slow_step(deployments: dict[str, Any]) -> None:
    assert all(bound._deployment_config.health_check_timeout_s >= 30 for bound in deployments.values())
