"""The cases of the protobuf fuzzer: which RPC, which bytes, and what the client does then. Case i of a seed is always
the same, whatever ran before it."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2

from outrider.v1 import generation_pb2 as pb
from tests.fuzz_bytes import mutated
from tests.fuzz_messages import random_message, set_field

_GENERATION = pb.DESCRIPTOR.services_by_name["GenerationService"]
_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"]
RPCS = {f"/{service.full_name}/{rpc.name}": rpc for service in (_GENERATION, _HEALTH) for rpc in service.methods}
"""By path."""

GENERATIONS = tuple(path for path in RPCS if path.endswith(("/Generate", "/GenerateStream")))
ENDLESS = f"/{_HEALTH.full_name}/Watch"

MOST_TOKENS = 8
MOST_ANSWERS = 4
"""Of requests that are served: their refusals and ends are tested, not their answers."""


@dataclass(frozen=True)
class Case:
    """One call. cancel: by the client, after the first message, or soon when there is only one."""

    number: int
    path: str
    data: bytes
    cancel: bool

    @property
    def streaming(self) -> bool:
        return bool(RPCS[self.path].server_streaming)

    @property
    def message(self) -> Message | None:
        """None: the bytes do not decode."""
        try:
            return GetMessageClass(RPCS[self.path].input_type).FromString(self.data)
        except DecodeError:
            return None


def case(seed: int, number: int) -> Case:
    rng = random.Random(f"{seed}:{number}")
    path = rng.choice(GENERATIONS) if rng.random() < 0.75 else rng.choice(list(RPCS))
    message = _message(rng, path)
    data = message.SerializeToString()
    if rng.random() < 0.3:
        data = mutated(rng, data)
        data = _kept_short(data, path)
    return Case(number, path, data, cancel=path == ENDLESS or rng.random() < 0.05)


def _message(rng: random.Random, path: str) -> Message:
    """Wholly random ones are refused for the first of many reasons; a good one with a flaw or two gets further."""
    descriptor = RPCS[path].input_type
    if path not in GENERATIONS:
        return random_message(rng, descriptor, density=rng.choice((0.3, 0.8)))
    if rng.random() < 0.25:
        message = random_message(rng, descriptor)
    else:
        message = _good_request(rng, descriptor)
        for _ in range(rng.choice((0, 1, 1, 2, 3))):
            _spoil(rng, message)
    _shorten(message)
    return message


def _good_request(rng: random.Random, descriptor: Any) -> Any:
    request: Any = GetMessageClass(descriptor)()
    prompt = rng.choice(("text", "token_ids", "chat"))
    if prompt == "text":
        request.text = rng.choice(("a", "Once upon a time", "x" * 200))
    elif prompt == "token_ids":
        request.token_ids.ids.extend(rng.randrange(256) for _ in range(rng.choice((1, 20, 300))))
    else:
        request.chat.messages.add(role="user", content="Hello!")
    if rng.random() < 0.5:
        request.sampling.temperature = rng.choice((0.0, 0.7, 1.0))
    return request


def _spoil(rng: random.Random, request: Any) -> None:
    """Give a random value to one field, of the request or of one of its parts."""
    message = rng.choice((request, request.sampling, request.sampling, request.speculation))
    message.SetInParent() if message is not request else None
    set_field(rng, message, rng.choice(list(message.DESCRIPTOR.fields)))


def _shorten(request: Any) -> None:
    sampling = request.sampling
    if sampling.max_tokens > MOST_TOKENS or not sampling.HasField("max_tokens"):
        sampling.max_tokens = MOST_TOKENS
    if MOST_ANSWERS < sampling.n <= 64:
        sampling.n = MOST_ANSWERS


def _kept_short(data: bytes, path: str) -> bytes:
    """A mutation may have taken max_tokens away. What comes last counts, in a message that decodes."""
    if path not in GENERATIONS:
        return data
    limit = pb.GenerateRequest()
    limit.sampling.max_tokens = MOST_TOKENS
    descriptor = RPCS[path].input_type
    try:
        request: Any = GetMessageClass(descriptor).FromString(data)
    except DecodeError:
        return data
    too_long = not request.sampling.HasField("max_tokens") or request.sampling.max_tokens > MOST_TOKENS
    return data + limit.SerializeToString() if too_long else data
