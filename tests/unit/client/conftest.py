"""A scripted server in this process, and the synchronous client that calls it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from outrider.deploy.client.sync_client import OutriderClient
from tests.unit.scripted_service import ScriptedService, serving


@pytest.fixture
def service() -> ScriptedService:
    return ScriptedService()


@pytest.fixture
def address(service: ScriptedService) -> Iterator[str]:
    with serving(service) as address:
        yield address


@pytest.fixture
def client(address: str) -> Iterator[OutriderClient]:
    with OutriderClient(address) as client:
        yield client
