"""The front door as clients meet it: Ray, Serve's gRPC proxy and the real Ingress, before a scripted target."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray import serve
from ray.serve.config import HTTPOptions, gRPCOptions

from outrider.actors.serve_seam.broadcast import broadcast
from outrider.actors.serving.grpc.servicer import Ingress
from outrider.deploy.client.sync_client import OutriderClient
from outrider.deploy.ports import pick_free_port
from tests.integration.ingress.stand_in_target import VOCAB_SIZE, K, stand_in_target


@pytest.fixture(scope="package")
def meeting_point(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("meeting")


@pytest.fixture(scope="package")
def address(meeting_point: Path) -> Iterator[str]:
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    port = pick_free_port()
    try:
        serve.start(
            http_options=HTTPOptions(host="127.0.0.1", port=pick_free_port()),
            grpc_options=gRPCOptions(
                port=port, grpc_servicer_functions=["outrider.actors.serve_seam.grpc_proxy.add_services"]
            ),
        )
        front = serve.deployment(Ingress, name="Ingress", max_ongoing_requests=100)
        serve.run(
            front.bind(stand_in_target(str(meeting_point)), "pair", K, VOCAB_SIZE, broadcast=broadcast), name="outrider"
        )
        yield f"127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


@pytest.fixture
def client(address: str) -> Iterator[OutriderClient]:
    with OutriderClient(address) as client:
        yield client
