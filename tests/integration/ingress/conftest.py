"""The real gateway, Ray, Serve's proxies and the real Ingress, before a scripted target."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray import serve

from outrider.actors.serve_adapter.broadcast import broadcast
from outrider.actors.serving.authentication import TOKEN_VARIABLE, Authenticator
from outrider.actors.serving.ingress import Ingress
from outrider.deploy.client.sync_client import OutriderClient
from tests.integration.ingress.stand_in_target import CONFIG, stand_in_target
from tests.support.cluster.serving import Deployments


@pytest.fixture(scope="package")
def meeting_point(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("meeting")


@pytest.fixture(scope="package")
def address(meeting_point: Path, deployments: Deployments) -> Iterator[str]:
    port = deployments.cluster()
    front = serve.deployment(Ingress, name="Ingress", max_ongoing_requests=100)
    target = stand_in_target(str(meeting_point))
    app = front.bind(target, CONFIG, broadcast=broadcast, authenticator=owners(), is_stopping=bool, pool=None)
    serve.run(app, name="outrider")
    yield f"127.0.0.1:{port}"
    serve.delete("outrider")


def owners() -> Authenticator:
    """Return what the ingress behind the tests' gateway checks."""
    return Authenticator(token=os.environ[TOKEN_VARIABLE])


@pytest.fixture
def client(address: str) -> Iterator[OutriderClient]:
    with OutriderClient(address) as client:
        yield client
