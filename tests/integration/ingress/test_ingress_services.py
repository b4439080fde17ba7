"""Tests what else is served over gRPC: health, reflection, and what is served by what."""

from __future__ import annotations

import time
from pathlib import Path

import grpc
import pytest
import ray
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from outrider.cluster.link.messages import PROTOCOL_VERSION
from outrider.deploy.client.sync_client import OutriderClient
from outrider.v1 import generation_pb2 as pb
from outrider.v1 import generation_pb2_grpc as rpc
from tests.integration.ingress.calls import wait_for
from tests.integration.ingress.stand_in_target import HANG_GUARD_S, K

pytestmark = pytest.mark.timeout(600)


SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def test_reflection_is_enough_to_call_without_stubs(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
        for service, rpc_name, fields, expected in (
            ("outrider.v1.GenerationService", "Tokenize", {"text": "hi"}, "token_ids: 104"),
            ("outrider.v1.GenerationService", "GetModelInfo", {}, 'architecture: "Llama"'),
            ("grpc.health.v1.Health", "Check", {}, "status: SERVING"),
        ):
            method = pool.FindServiceByName(service).FindMethodByName(rpc_name)
            request, response = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
            call = channel.unary_unary(
                f"/{service}/{rpc_name}",
                request_serializer=request.SerializeToString,
                response_deserializer=response.FromString,
            )
            assert expected in str(call(request(**fields)))


def test_health_is_that_of_the_target(address: str, meeting_point: Path) -> None:
    with grpc.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", "outrider.v1.GenerationService"):
            assert health.Check(health_pb2.HealthCheckRequest(service=service)).status == SERVING
        with pytest.raises(grpc.RpcError) as caught:
            health.Check(health_pb2.HealthCheckRequest(service="outrider.v2.Other"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        statuses = health.List(health_pb2.HealthListRequest()).statuses
        assert {name: each.status for name, each in statuses.items()} == {
            "": SERVING,
            "outrider.v1.GenerationService": SERVING,
            "readiness": SERVING,
            "liveness": SERVING,
        }
        watched = health.Watch(health_pb2.HealthCheckRequest(), timeout=HANG_GUARD_S)

        def is_told(status: int) -> bool:
            """Maybe after another: a target that is slow to answer is not ready."""
            return any(each.status == status for each in watched)

        def is_listed() -> bool:
            found = {name: each.status for name, each in health.List(health_pb2.HealthListRequest()).statuses.items()}
            return (found["readiness"], found["liveness"]) == (NOT_SERVING, SERVING)

        assert is_told(SERVING)
        (meeting_point / "broken").touch()
        assert is_told(NOT_SERVING)
        wait_for(is_listed)
        (meeting_point / "broken").unlink()
        assert is_told(SERVING)
        watched.cancel()
        unknown = health.Watch(health_pb2.HealthCheckRequest(service="x"), timeout=HANG_GUARD_S)
        assert next(unknown).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        unknown.cancel()


def test_what_is_served_and_by_what(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        stub = rpc.GenerationServiceStub(channel)
        model = stub.GetModelInfo(pb.GetModelInfoRequest())
        assert (model.model, model.max_model_len, model.num_speculative_tokens) == ("pair", 256, K)
        server = stub.GetServerInfo(pb.GetServerInfoRequest())
        assert server.ray_version == ray.__version__
        assert server.outrider_version
        assert server.vllm_version.startswith("0.")
        assert server.torch_version
        assert 0 <= time.time() - server.start_time.ToSeconds() < 3600
        assert (server.api, server.link_protocol_version) == ("outrider.v1", PROTOCOL_VERSION)


def test_a_single_application_needs_no_name_and_minds_no_wrong_one(address: str) -> None:
    with OutriderClient(address, application="another") as client:
        assert client.generate("go").text == "one three"
