"""What Serve is asked for when a configuration is deployed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.cluster.config import ConfigError, parse_config
from outrider.deploy import app
from outrider.deploy.app import TAKE_DOWN_S, build, build_app, plan_replica

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


def checkpoint(path: Path, vocab: dict[str, int], vocab_size: int = 300) -> str:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"vocab_size": vocab_size}))
    (path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": []}))
    return str(path)


def test_a_python_that_ray_cannot_start_is_refused_before_anything_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.executable", "/home/me/my models/.venv/bin/python")
    with pytest.raises(ConfigError, match="make VENV="):
        plan_replica(parse_config({"target": {"model": "t"}}))


@pytest.mark.parametrize("name", ["Ingress", "Target"])
def test_a_replica_that_is_taken_down_may_finish_what_it_has_begun(deployments: dict[str, Any], name: str) -> None:
    config = deployments[name]._deployment_config
    assert config.graceful_shutdown_timeout_s == DRAIN_S + TAKE_DOWN_S, "Serve kills it then, its engine's end included"
    assert 0 < config.graceful_shutdown_wait_loop_s <= TAKE_DOWN_S / 5


def test_an_application_may_come_before_its_nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A head alone, as KubeRay's operator finds it: Ray waits for what it has no room for."""
    nodes(monkeypatch, CPU=0.0)
    assert build({"target": {"model": checkpoint(tmp_path / "target", {"a": 0})}, "drafter": {"method": "ngram"}})


def nodes(monkeypatch: pytest.MonkeyPatch, **resources: float) -> None:
    """There is one, which has these."""
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr("ray.nodes", lambda: [{"Alive": True, "Resources": resources}])


def test_labels_reach_serve_by_bundle() -> None:
    target = {"model": "t", "node_labels": {"zone": "a"}}
    for placement, bundles in (("with_target", 2), ("pool", 1)):
        drafter = {"method": "ngram", "placement": placement, "node_labels": {"disk": "fast"}}
        found = bound(drafter, target=target)
        selector = found["Target"]._replica_config.placement_group_bundle_label_selector
        assert selector == [{"zone": "a"}, {"disk": "fast"}][:bundles]
    assert found["DrafterPool"]._replica_config.placement_group_bundle_label_selector == [{"disk": "fast"}] * 2


@pytest.mark.parametrize(
    ("surge", "cpus", "surges"),
    [(None, 6.0, True), (None, 5.0, False), (False, 6.0, False), (True, 5.0, True)],
)
def test_a_deploy_has_the_new_replica_first_where_there_is_room(
    monkeypatch: pytest.MonkeyPatch, surge: bool | None, cpus: float, surges: bool
) -> None:
    """Serve waits for room without end, so that without any a deploy would never be over."""
    nodes(monkeypatch, CPU=cpus)
    monkeypatch.setattr(app, "available_cores", lambda: [0, 1])  # 3 CPUs a replica
    found = built(surge=surge)
    assert found["Target"]._deployment_config.max_surge_percent == (1 if surges else 0)
    assert found["Ingress"]._deployment_config.max_surge_percent == 1, "the front takes no room"


@pytest.mark.parametrize(
    ("room", "surge", "expected"),
    [
        (0.0, None, (0, 0)),
        (2.0, None, (0, 1)),
        (3.0, None, (1, 0)),
        (5.0, None, (1, 1)),
        (3.0, True, (1, 0)),
        (5.0, False, (0, 0)),
    ],
)
def test_a_pool_has_the_new_drafter_first_where_there_is_room_for_it_too(
    monkeypatch: pytest.MonkeyPatch, room: float, surge: bool | None, expected: tuple[int, int]
) -> None:
    """A replica takes 3 processors and a drafter 2, and a deploy may have one more of both at once."""
    sections = {"target": {"model": "t", "tensor_parallel_size": 2}, "drafter": pool_of(2)}
    plan = plan_replica(parse_config(sections))
    nodes(monkeypatch, CPU=plan.total("CPU", 1, 2) + room)
    found = bound(sections["drafter"], target=sections["target"], surge=surge)
    surges = tuple(found[name]._deployment_config.max_surge_percent for name in ("Target", "DrafterPool"))
    assert surges == expected


def test_replicas_that_follow_the_load_are_serves_to_start(deployments: dict[str, Any]) -> None:
    scaled = built(autoscaling={"min": 2, "max": 4}, max_ongoing_requests=8, max_queued_requests=32)
    config = scaled["Target"]._deployment_config
    assert (config.autoscaling_config.min_replicas, config.autoscaling_config.max_replicas) == (2, 4)
    assert config.autoscaling_config.policy.policy_function.endswith(":TargetScaling")
    assert deployments["Target"]._deployment_config.autoscaling_config is None
    assert deployments["Target"]._deployment_config.num_replicas == 1
    assert scaled["Ingress"]._deployment_config.max_ongoing_requests >= 4 * 8 + 32, "whoever grows has room"
    assert scaled["Ingress"].init_kwargs["max_retries"] == 3


@pytest.mark.parametrize("backend", ["nccl", "hccl", "xccl"])
def test_a_device_s_wire_is_refused_where_nothing_runs_on_one(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    data = {"target": {"model": "t"}, "drafter": {"method": "draft_model", "model": "d"}, "link": {"backend": backend}}
    monkeypatch.setattr(app, "engine_on_gpu", lambda: False)
    with pytest.raises(ConfigError, match=rf"link\.backend: {backend} needs a device .*, and this vLLM runs on CPU"):
        plan_replica(parse_config(data))
    monkeypatch.setattr(app, "engine_on_gpu", lambda: True)
    assert plan_replica(parse_config(data)).cores is None
