"""The installed Ray Serve has every private or alpha name that actors/serve_adapter calls or overrides."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from ray._private.worker import global_worker
from ray.serve._private import autoscaling_state, constants, logging_utils
from ray.serve._private.common import ReplicaID, RequestMetadata, TimeStampedValue
from ray.serve._private.replica import Replica, ReplicaActor, UserCallableWrapper
from ray.serve.handle import DeploymentBroadcastResponse, DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter

from outrider.actors.serve_adapter.replica_log import SERVE_LOGGER
from outrider.actors.serve_adapter.request_router import TargetRouter

OVERRIDDEN = [
    name for name in vars(TargetRouter) if hasattr(RequestRouter, name) and not name.startswith(("__", "_abc"))
]


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_the_router_overrides_public_hooks_as_they_are(name: str) -> None:
    assert not name.startswith("_")
    ours, theirs = vars(TargetRouter)[name], inspect.getattr_static(RequestRouter, name)
    if isinstance(theirs, property):
        assert isinstance(ours, property)
    elif name != "initialize_state":  # takes whatever request_router_kwargs says
        assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters)


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (RequestRouter._fulfill_pending_requests, ["target_num_routing_tasks", "_choose_replicas_with_backoff"]),
        (RequestRouter.target_num_routing_tasks.fget, ["max_num_routing_tasks"]),
        (RequestRouter.curr_replicas.fget, ["_replicas"]),
        (Replica._perform_graceful_shutdown, ["_shutting_down", "_drain_ongoing_requests"]),
        (ReplicaActor.__init__, ["_replica_impl"]),
        (UserCallableWrapper.call_record_autoscaling_stats, ["call_user_autoscaling_stats"]),
        (autoscaling_state.DeploymentAutoscalingState.register, ["_resolve_policy_callable"]),
        (logging_utils.configure_component_logger, ["MemoryHandler"]),
        (DeploymentHandle.broadcast, ["DeploymentBroadcastResponse"]),
    ],
)
def test_what_serve_does_there_is_what_we_rely_on(function: Any, names: list[str]) -> None:
    source = inspect.getsource(function)
    assert [name for name in names if name not in source] == []


def test_attributes_and_constants() -> None:
    assert {"args", "metadata", "routing_context", "future"} <= {*PendingRequest.__dataclass_fields__}
    assert {"timestamp", "value"} <= {*TimeStampedValue.__dataclass_fields__}
    assert "internal_request_id" in RequestMetadata.__dataclass_fields__
    assert "unique_id" in ReplicaID.__dataclass_fields__
    assert hasattr(global_worker, "actors")
    assert inspect.iscoroutinefunction(DeploymentBroadcastResponse._fetch_replica_results_async)
    assert constants.SERVE_LOGGER_NAME == SERVE_LOGGER
    assert constants.SERVE_CONTROLLER_NAME
    assert constants.SERVE_NAMESPACE
