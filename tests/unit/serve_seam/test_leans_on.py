"""The installed Ray Serve has every name that we lean on; one that lacks a name is refused by it."""

from __future__ import annotations

import pytest
from ray.serve._private import grpc_util
from ray.serve.handle import DeploymentBroadcastResponse
from ray.serve.request_router import RequestRouter

from outrider.actors.serve_seam import leans_on
from outrider.actors.serve_seam.request_router import TargetRouter
from outrider.cluster.borrowed import Table
from outrider.cluster.config import ConfigError


@pytest.mark.parametrize("table", leans_on.TABLES, ids=lambda table: table.used_by)
def test_every_name_is_there(table: Table):
    assert table.problems() == []


def test_what_the_router_overrides_is_listed():
    listed = {name.rpartition(".")[2] for borrowed in leans_on.CALLER.names for name in borrowed.names()}
    overridden = {name for name in vars(TargetRouter) if hasattr(RequestRouter, name) and not name.startswith("__")}
    assert "_choose_replica_for_request" in overridden
    assert overridden - {"_abc_impl"} <= listed


def test_a_renamed_method_is_refused_by_its_name(monkeypatch):
    monkeypatch.delattr(DeploymentBroadcastResponse, "_fetch_replica_results_async")
    router = TargetRouter.__new__(TargetRouter)
    with pytest.raises(ConfigError) as refused:
        router.initialize_state()
    said = str(refused.value)
    assert "ray.serve.handle.DeploymentBroadcastResponse._fetch_replica_results_async does not exist" in said
    assert f"Ray {leans_on.PROJECT.installed} is installed" in said
    assert "written for 2.60" in said


def test_a_factory_that_nobody_asks_is_refused(monkeypatch):
    monkeypatch.setattr(grpc_util.gRPCGenericServer, "_override_method_handler", lambda self, method, handler: handler)
    assert leans_on.GRPC_PROXY.problems() == [
        "ray.serve._private.grpc_util.gRPCGenericServer._override_method_handler no longer looks up "
        "ray.serve._private.grpc_util.gRPCGenericServer.service_handler_factory"
    ]
