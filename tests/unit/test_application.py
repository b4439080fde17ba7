"""What Serve is asked for when a configuration is deployed."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.cluster.config import ConfigError, parse_config
from outrider.deploy import app
from outrider.deploy.app import TAKE_DOWN_S, build_app, plan_replica

DRAIN_S = 77.0


def built(**serving: Any) -> dict[str, Any]:
    """Return the deployments of an application by name, as Serve would get them."""
    return bound({"method": "ngram"}, **serving)


@pytest.fixture(scope="module")
def deployments() -> dict[str, Any]:
    return built(drain_s=DRAIN_S)


def bound(drafter: dict[str, Any], target: dict[str, Any] | None = None, **serving: Any) -> dict[str, Any]:
    """Return what is bound for such a drafter, by name."""
    config = parse_config({"target": target or {"model": "t"}, "drafter": drafter, "serving": serving})
    ingress = build_app(config, plan_replica(config))._bound_deployment
    found = [*ingress.init_args, *ingress.init_kwargs.values()]
    inner = [arg._bound_deployment for arg in found if hasattr(arg, "_bound_deployment")]
    return {each.name: each for each in (ingress, *inner)}


def pool_of(number: int) -> dict[str, Any]:
    return {"method": "ngram", "placement": "pool", "num_drafters": number}


def test_a_pool_is_a_deployment_of_its_own_on_nodes_of_its_own() -> None:
    found = bound(pool_of(3), num_replicas=2)
    assert found.keys() == {"Ingress", "Target", "DrafterPool"}
    pool, target = found["DrafterPool"], found["Target"]
    assert (pool._deployment_config.num_replicas, target._deployment_config.num_replicas) == (3, 2)
    assert pool._replica_config.placement_group_strategy == "STRICT_PACK"
    assert len(pool._replica_config.placement_group_bundles) == 2
    assert len(target._replica_config.placement_group_bundles) == 1, "no room for a drafter of its own"
    assert bound({"method": "ngram"}).keys() == {"Ingress", "Target"}


@pytest.mark.parametrize("num_ingresses", [1, 2, 15, 16])
def test_a_replica_that_all_front_doors_have_filled_hears_an_abort(num_ingresses: int) -> None:
    """A call to each replica waits for a slot there like any other (broadcast.py)."""
    target = built(num_ingresses=num_ingresses, max_ongoing_requests=64)["Target"]._deployment_config
    places = target.request_router_config.request_router_kwargs["max_ongoing_requests"]
    assert 64 <= num_ingresses * places < target.max_ongoing_requests


@pytest.mark.parametrize("name", ["Ingress", "Target"])
def test_a_replica_that_is_taken_down_may_finish_what_it_has_begun(deployments: dict[str, Any], name: str) -> None:
    config = deployments[name]._deployment_config
    assert config.graceful_shutdown_timeout_s == DRAIN_S + TAKE_DOWN_S, "Serve kills it then, its engine's end included"
    assert 0 < config.graceful_shutdown_wait_loop_s <= TAKE_DOWN_S / 5


def test_labels_reach_serve_by_bundle() -> None:
    target = {"model": "t", "node_labels": {"zone": "a"}}
    for placement, bundles in (("with_target", 2), ("pool", 1)):
        drafter = {"method": "ngram", "placement": placement, "node_labels": {"disk": "fast"}}
        found = bound(drafter, target=target)
        selector = found["Target"]._replica_config.placement_group_bundle_label_selector
        assert selector == [{"zone": "a"}, {"disk": "fast"}][:bundles]
    assert found["DrafterPool"]._replica_config.placement_group_bundle_label_selector == [{"disk": "fast"}] * 2


def test_a_deploy_has_the_new_replica_first_if_it_is_told_to() -> None:
    """Serve waits for room without end, so that without any a deploy would never be over."""
    for surge in (False, True):
        found = bound(pool_of(2), surge=surge)
        surges = {name: each._deployment_config.max_surge_percent for name, each in found.items()}
        assert surges == {"Target": int(surge), "DrafterPool": int(surge), "Ingress": 1}, "an ingress takes no room"


def test_replicas_that_follow_the_load_are_serves_to_start(deployments: dict[str, Any]) -> None:
    scaled = built(autoscaling={"min": 2, "max": 4}, max_ongoing_requests=8, max_queued_requests=32)
    config = scaled["Target"]._deployment_config
    assert (config.autoscaling_config.min_replicas, config.autoscaling_config.max_replicas) == (2, 4)
    assert config.autoscaling_config.policy.policy_function.endswith(":TargetScaling")
    assert deployments["Target"]._deployment_config.autoscaling_config is None
    assert deployments["Target"]._deployment_config.num_replicas == 1
    assert scaled["Ingress"]._deployment_config.max_ongoing_requests >= 4 * 8 + 32, "whoever grows has room"


@pytest.mark.parametrize("backend", ["nccl", "hccl", "xccl"])
def test_a_device_s_wire_is_refused_where_nothing_runs_on_one(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    data = {"target": {"model": "t"}, "drafter": {"method": "draft_model", "model": "d"}, "link": {"backend": backend}}
    monkeypatch.setattr(app, "engine_on_gpu", lambda: False)
    with pytest.raises(ConfigError, match=rf"link\.backend: {backend} needs a device .*, and this vLLM runs on CPU"):
        plan_replica(parse_config(data))
    monkeypatch.setattr(app, "engine_on_gpu", lambda: True)
    assert plan_replica(parse_config(data)).cores is None
