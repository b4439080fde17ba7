"""A deployment under attack: one target and its drafter, behind gateways of any settings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from outrider.deploy.gateway import Gateway
from tests.security.attackers import Caller
from tests.support.cluster.serving import HANG_GUARD_S, Deployment, Deployments, wait_until_idle


class Victim:
    """Starts gateways and callers, and ends them."""

    def __init__(self, deployment: Deployment, deployments: Deployments) -> None:
        self.deployment, self.backends, self._another = deployment, deployments.backends, deployments.another_gateway
        self._stack = ExitStack()

    def gateway(self, **config: Any) -> Gateway:
        gateway = self._another(**config)
        self._stack.callback(gateway.stop)
        return gateway

    def caller(self, gateway: Gateway | None = None, **of: Any) -> Caller:
        """Return a caller, by default behind the tests' own gateway, which no attack here goes to."""
        ports = _ports(self.deployment) if gateway is None else (gateway.config.http_port, gateway.config.grpc_port)
        return self._stack.enter_context(Caller(*ports, **of))

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def victim(pair: Deployment, deployments: Deployments) -> Iterator[Victim]:
    """After the attack nothing runs any more, and either API answers with the tokens that it gave before."""
    victim = Victim(pair, deployments)
    try:
        with Caller(*_ports(pair)) as legitimate:
            before = legitimate.tokens()
            assert before[0] == before[1]
            yield victim
            victim.close()
            wait_until_idle(pair, HANG_GUARD_S)
            assert legitimate.tokens() == before
    finally:
        victim.close()


def _ports(deployment: Deployment) -> tuple[int, int]:
    return int(deployment.http_url.rpartition(":")[2]), int(deployment.address.rpartition(":")[2])
