"""What the synchronous and the asynchronous client know of the servers they talk to."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from grpc_health.v1 import health_pb2_grpc

from deploy.client.error import OutriderError
from outrider.v1 import generation_pb2_grpc as rpc

DEFAULT_ADDRESS = "127.0.0.1:9000"

PROBE_S = 1.0
"""How long an address that did not answer gets to prove that something listens there."""

Pairs = Sequence[tuple[str, str | bytes]]


@dataclass(frozen=True)
class Servers:
    """addresses: ``host:port`` each, of servers that serve the same model. credentials: None sends in the clear."""

    addresses: tuple[str, ...]
    metadata: tuple[tuple[str, str | bytes], ...]
    credentials: grpc.ChannelCredentials | None

    @classmethod
    def of(
        cls,
        address: str | Sequence[str],
        application: str | None,
        metadata: Pairs,
        credentials: grpc.ChannelCredentials | None,
    ) -> Servers:
        """Raises ValueError for no address."""
        addresses = (address,) if isinstance(address, str) else tuple(address)
        if not addresses or not all(addresses):
            raise ValueError("address: is empty; send host:port, or a list of them")
        named = (("application", application),) if application else ()
        return cls(addresses, (*named, *metadata), credentials)

    def channel(self, number: int, transport: Any) -> Any:
        """A channel to one of them. transport: ``grpc`` or ``grpc.aio``."""
        address = self.addresses[number]
        if self.credentials is None:
            return transport.insecure_channel(address, options=_channel_options(address))
        return transport.secure_channel(address, self.credentials, options=_channel_options(address))

    def explained(self, error: OutriderError, number: int) -> OutriderError:
        """UNAVAILABLE from where nothing listens, in words that help."""
        message = f"no server answers at {self.addresses[number]}; start one with 'outrider serve'"
        return OutriderError(error.code, message, request_id=error.request_id)


class Stubs:
    """The callables of every service on one channel, by the name of the RPC."""

    def __init__(self, channel: Any) -> None:
        self._stubs = (rpc.GenerationServiceStub(channel), health_pb2_grpc.HealthStub(channel))

    def method(self, name: str) -> Any:
        return next(getattr(stub, name) for stub in self._stubs if hasattr(stub, name))


def may_be_absent(error: OutriderError) -> bool:
    """Whether the error could mean that no server of ours has answered."""
    return error.code is grpc.StatusCode.UNAVAILABLE and error.reason is None


def _channel_options(address: str) -> list[tuple[str, int]]:
    # A proxy named in the environment is for the way out of this machine.
    options = [("grpc.enable_http_proxy", 0)] if _is_loopback(address) else []
    # Log-probabilities of a long prompt are more than gRPC takes by default.
    return [*options, ("grpc.max_receive_message_length", -1)]


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
