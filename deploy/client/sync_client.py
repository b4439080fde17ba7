"""Provides the synchronous client of ``outrider.v1.GenerationService``, and its base for asyncio."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, Concatenate, Unpack

import grpc
from grpc_health.v1 import health_pb2_grpc

from outrider.deploy.client import requests
from outrider.deploy.client.requests import Answer, Call, GenerationOptions, OutriderError, P, Prompt
from outrider.v1 import generation_pb2 as pb
from outrider.v1 import generation_pb2_grpc as rpc

DEFAULT_ADDRESS = "127.0.0.1:9000"
API_KEY_VARIABLE = "OUTRIDER_API_KEY"  # in the environment: the key of clients that are given none
_BACKOFF = {"initialBackoff": "0.2s", "maxBackoff": "5s", "backoffMultiplier": 3}
_RETRIED = {"retryableStatusCodes": ["UNAVAILABLE", "RESOURCE_EXHAUSTED"]}


class GrpcClient:
    """Calls one server, or several that serve the same model.

    address: ``host:port``, or a list of IP addresses with ports: calls go to them in turn.
    api_key: None for OUTRIDER_API_KEY of the environment, if it is set.
    application: name of the Serve application, needed only when a server runs several.
    credentials: ``grpc.ssl_channel_credentials(ca, key, certificate)`` for a server that speaks TLS; None for no TLS.
    metadata: sent with every call, such as what a gateway asks for.
    retries: 0 to 4, of calls that failed with UNAVAILABLE or RESOURCE_EXHAUSTED before their first message.
    wait_for_ready: calls wait, within their timeout_s, for a server that cannot be reached yet.
    """

    _transport: Any = grpc
    _channel: Any = None

    def __init__(
        self,
        address: str | Sequence[str] = DEFAULT_ADDRESS,
        *,
        api_key: str | None = None,
        application: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        metadata: Sequence[tuple[str, str | bytes]] = (),
        retries: int = 0,
        wait_for_ready: bool = False,
    ) -> None:
        self._target = _target([address] if isinstance(address, str) else address)
        if credentials is not None and "," in self._target:
            raise ValueError("address: several go without TLS only; write one name that DNS resolves to all of them")
        self._credentials, self._metadata, self._closed = credentials, list(metadata), False
        if application:
            self._metadata.append(("application", application))
        key = os.environ.get(API_KEY_VARIABLE) if api_key is None else api_key
        if key and not any(name.lower() == "authorization" for name, _ in metadata):
            if not re.fullmatch("[!-~]+", key):
                raise ValueError(f"api_key, or {API_KEY_VARIABLE}: has characters that no key has")
            self._metadata.append(("authorization", f"Bearer {key}"))
        retry = {"retryPolicy": {"maxAttempts": retries + 1, **_BACKOFF, **_RETRIED}} if retries else {}
        methods = [{"name": [{}], "waitForReady": wait_for_ready, **retry}]
        config = {"loadBalancingConfig": [{"round_robin": {}}], "methodConfig": methods}
        self._options = [
            ("grpc.service_config", json.dumps(config)),
            ("grpc.max_receive_message_length", -1),  # log-probabilities of a long prompt exceed gRPC's default
            # A proxy that the environment names is for other machines.
            ("grpc.enable_http_proxy", int(not re.match(r"(ipv4:)?(localhost|127\.|\[::1\])", self._target))),
        ]
        if self._transport is grpc:  # grpc.aio's channels belong to the event loop that runs when they are made
            self._connect()

    def _connect(self) -> None:
        secure = () if self._credentials is None else (self._credentials,)
        connect = self._transport.secure_channel if secure else self._transport.insecure_channel
        self._channel = connect(self._target, *secure, options=self._options)
        self._stubs = (rpc.GenerationServiceStub(self._channel), health_pb2_grpc.HealthStub(self._channel))

    def _send(self, call: Call[Any], *, future: bool = False) -> Any:
        if self._closed:
            raise OutriderError(grpc.StatusCode.CANCELLED, "the client was closed")
        if self._channel is None:
            self._connect()
        method = next(getattr(stub, call.rpc) for stub in self._stubs if hasattr(stub, call.rpc))
        return (method.future if future else method)(call.request, timeout=call.timeout_s, metadata=self._metadata)

    def _fail(self, error: Any, call: Call[Any]) -> Any:
        code, details = error.code(), error.details() or "no details"
        if "parsing HTTP/2" in details or "http2 header with status" in details:  # gRPC's words for another protocol
            details = f"what answers at {self._target} does not speak gRPC; give the gRPC port ({details})"
        elif code is grpc.StatusCode.UNAVAILABLE and "; last error: " in details:  # and for no connection
            fix = "start one with 'outrider serve', or check that this is its gRPC port, and TLS"
            details = f"no server answers at {self._target}; {fix} ({details})"
        return call.fail(code, details)


class CompletionStream(Iterator[pb.GenerateStreamResponse], AbstractContextManager["CompletionStream"]):
    """Iterates over the messages of one request, one per round and answer.

    Closing it before its end cancels the request on the server; so does leaving its ``with`` block, and losing the last
    reference to it.
    """

    def __init__(self, client: OutriderClient, call: Call[pb.GenerateStreamResponse], sent: Any) -> None:
        self._client, self._call, self._sent, self._closed = client, call, sent, False

    def __next__(self) -> pb.GenerateStreamResponse:
        try:
            return next(self._sent)
        except grpc.RpcError as error:
            if not self._closed:
                self._client._fail(error, self._call)
            raise StopIteration from None

    def close(self) -> None:
        """Cancel the request, unless it has ended. Iterating then stops; may be called from another thread."""
        self._closed = True
        self._sent.cancel()

    def __exit__(self, *_: object) -> None:
        self.close()


def _unary(build: Callable[P, Call[Answer]]) -> Callable[Concatenate[OutriderClient, P], Answer]:
    return wraps(build)(lambda client, *args, **options: client._call(build(*args, **options)))


class OutriderClient(GrpcClient, AbstractContextManager["OutriderClient"]):
    __doc__ = f"{GrpcClient.__doc__}\n    May be shared by threads. Calls that fail raise OutriderError."

    generate = _unary(requests.generate)
    tokenize = _unary(requests.tokenize)
    detokenize = _unary(requests.detokenize)
    abort = _unary(requests.abort)
    status = _unary(requests.status)
    revert_drafter = _unary(requests.revert_drafter)
    model_info = _unary(requests.model_info)
    healthy = _unary(requests.healthy)

    def stream(self, prompt: Prompt, **options: Unpack[GenerationOptions]) -> CompletionStream:
        """Return the messages of the answers, told apart by index where n is above 1."""
        call = requests.stream(prompt, options)
        return CompletionStream(self, call, self._send(call))

    def close(self) -> None:
        """Close the connections; calls under way are cancelled."""
        self._closed = True
        self._channel.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, call: Call[Any]) -> Any:
        sent = self._send(call, future=True)
        try:
            return call.answer(sent.result())
        except grpc.RpcError as error:
            return self._fail(error, call)
        finally:
            sent.cancel()  # an interrupted wait must not leave the server working; no effect on a finished call


def _target(addresses: Sequence[str]) -> str:
    """Return gRPC's name for one server, or for a list of them."""
    name, ipv4, ipv6 = r"[^\s:/\[\],]+:\d+", r"[0-9.]+:\d+", r"\[[0-9a-fA-F:.]+\]:\d+"
    for scheme, form in (("ipv4:", ipv4), ("ipv6:", ipv6)) if len(addresses) > 1 else (("", f"{name}|{ipv6}"),):
        if addresses and all(re.fullmatch(form, address) for address in addresses):
            return scheme + ",".join(addresses)
    fix = f"write host:port without a scheme, such as {DEFAULT_ADDRESS}; of several servers, the IP address of each"
    raise ValueError(f"address: {', '.join(addresses)!r}: {fix}, or one name that DNS resolves to all of them")
