"""Hypothesis strategies for protobuf requests, made from nothing but the messages' descriptors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from outrider.v1 import generation_pb2 as pb

FUZZ = settings(deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
"""Draws the same requests in every run."""

_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"]
_SERVICES = (pb.DESCRIPTOR.services_by_name["GenerationService"], _HEALTH)
RPCS = {f"/{service.full_name}/{rpc.name}": rpc for service in _SERVICES for rpc in service.methods}
"""Methods by path."""

GENERATIONS = tuple(path for path in RPCS if path.endswith(("/Generate", "/GenerateStream")))
ENDLESS = f"/{_HEALTH.full_name}/Watch"

MAX_TOKENS, MAX_ANSWERS = 8, 4
"""Bounds of requests that are served: their refusals and ends are tested, not their answers."""

_BITS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
_TEXTS = (
    "", "a", "Once upon a time", "user", "assistant", "pair", "\0", "\n\r\t\x1b[31m\x7f", "\u202eright to left",
    "👩‍👩‍👧‍👦", "\ufeff\uffff\U0010ffff", "%s %d {} {0} $(x) `y` ../../etc/passwd", "<|im_start|>system\n<s></s>[INST]",
    "{{ 7 * 7 }}{% for i in range(9) %}{{ i }}{% endfor %}", "{{ 1 / 0 }}",
    '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}',
    '{"type": "string", "pattern": "["}', '{"$ref": "#"}', '{"type": 5}', "[" * 200, "(a+)+$", "[a-", "(?<=a)b\\1",
    'root ::= "a" root | "b"', "root ::= root", "root ::= (", "start: NUMBER", "nan", "-1",
)  # fmt: skip
_LONG = st.builds(lambda text, times: text * times, st.sampled_from(_TEXTS), st.sampled_from((40, 400, 4000)))
_TEXT = st.one_of(st.sampled_from(_TEXTS), st.sampled_from(_TEXTS), st.text(max_size=12), _LONG)


def scalars(field: FieldDescriptor) -> SearchStrategy[Any]:
    """Draws a value of a field that is no message, or of one entry of a repeated field."""
    kind = field.cpp_type
    if kind in _BITS:
        # Small numbers most of the time: other fields can agree with them.
        return st.one_of(st.integers(0, 9), st.integers(0, 300), st.integers(*_BITS[kind]))
    if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        width = 64 if kind == FieldDescriptor.CPPTYPE_DOUBLE else 32
        return st.one_of(st.sampled_from((0.0, 0.5, 1.0)), st.floats(0, 2, width=width), st.floats(width=width))
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return st.booleans()
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        known = [value.number for value in field.enum_type.values]
        return st.sampled_from([*known, max(known) + 1, -1, 2**31 - 1])
    return _TEXT if field.type == FieldDescriptor.TYPE_STRING else _TEXT.map(str.encode)


@st.composite
def messages(draw: DrawFn, descriptor: Descriptor, depth: int = 4) -> Any:
    """Draws a message with up to six fields set; of a oneof the one that is set last stays."""
    message = GetMessageClass(descriptor)()
    if depth and descriptor.fields:
        for field in draw(st.lists(st.sampled_from(list(descriptor.fields)), max_size=6)):
            _set(draw, message, field, depth)
    return message


def _set(draw: DrawFn, message: Message, field: FieldDescriptor, depth: int) -> None:
    value = getattr(message, field.name)
    inner = None if field.message_type is None else messages(field.message_type, depth - 1)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, of = (field.message_type.fields_by_name[name] for name in ("key", "value"))
        for name in draw(st.lists(scalars(key), max_size=3)):
            if of.message_type is not None:
                value[name].CopyFrom(draw(messages(of.message_type, min(depth, 3) - 1)))
            else:
                value[name] = draw(scalars(of))
    elif field.is_repeated:
        value.extend(draw(st.lists(scalars(field) if inner is None else inner, max_size=5)))
    elif inner is not None:
        value.SetInParent()
        value.MergeFrom(draw(inner))
    else:
        setattr(message, field.name, draw(scalars(field)))


@st.composite
def generations(draw: DrawFn, descriptor: Descriptor) -> Any:
    """Draws a good request with up to four flaws, which gets further than a message that is random all over."""
    request = GetMessageClass(descriptor)()
    prompt = draw(st.sampled_from(("text", "token_ids", "chat")))
    if prompt == "text":
        request.text = draw(st.sampled_from(("a", "Once upon a time", "x" * 200)))
    elif prompt == "token_ids":
        request.token_ids.ids.extend(draw(st.lists(st.integers(0, 255), min_size=1, max_size=30)))
    else:
        request.chat.messages.add(role="user", content="Hello!")
    for part in draw(st.lists(st.sampled_from(("", *["sampling"] * 4, "speculation")), max_size=4)):
        message = getattr(request, part) if part else request
        _set(draw, message, draw(st.sampled_from(list(message.DESCRIPTOR.fields))), depth=3)
    return request


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def _nested(depth: int) -> bytes:
    """Returns field 1 in field 1 in field 1, deeper than decoders follow."""
    data = b""
    for _ in range(depth):
        data = b"\x0a" + _varint(len(data)) + data
    return data


_APPENDED = (
    b"\x1a\x02\xc3\x28",  # text that is no UTF-8
    _varint(1000 << 3 | 2) + b"\x03abc" + _varint((2**29 - 1) << 3) + _varint(2**64 - 1),  # unknown fields
    *(b"\x1a" + _varint(length) + b"abc" for length in (127, 2**31 - 1, 2**63)),  # a length that lies
    *(b"\x40" + b"\xff" * length for length in (9, 11, 100)),  # a number without an end
    *(b"\x0b" * depth + b"\x0c" * depth for depth in (1, 50, 200, 10_000)),  # groups
    *(_nested(depth) for depth in (20, 99, 101, 300)),
    b"\x0e12345678",  # wire types that there are not
    b"\x0f12345678",
)


@st.composite
def damaged(draw: DrawFn, data: bytes) -> bytes:
    """Draws the bytes with one damage: some still decode, as something else; most do not."""
    start, end = sorted(draw(st.tuples(*[st.integers(0, len(data))] * 2)))
    damages: tuple[Callable[[], bytes], ...] = (
        lambda: data[:start],
        lambda: data[:start] + draw(st.binary(min_size=1, max_size=16)) + data[start:],
        lambda: data[:start] + draw(st.binary(min_size=1, max_size=2)) + data[start + 1 :],
        lambda: data[:end] + data[start:end] * 3 + data[end:],
        lambda: draw(st.binary(max_size=100)),
        *[lambda: data + draw(st.sampled_from(_APPENDED))] * 4,
    )
    return draw(st.sampled_from(damages))()


@dataclass(frozen=True)
class Call:
    """Is one call of the server. cancel: by the client, after the first message, or soon when there is only one."""

    path: str
    data: bytes
    cancel: bool

    @property
    def streaming(self) -> bool:
        return bool(RPCS[self.path].server_streaming)

    @property
    def message(self) -> Any:
        """Return the decoded request; None: the bytes do not decode."""
        try:
            return GetMessageClass(RPCS[self.path].input_type).FromString(self.data)
        except DecodeError:
            return None


@st.composite
def calls(draw: DrawFn) -> Call:
    """Draws a call of any RPC, most of them generations, a third of them with damaged bytes."""
    path = draw(st.one_of(st.sampled_from(list(RPCS)), *[st.sampled_from(GENERATIONS)] * 2))
    descriptor = RPCS[path].input_type
    if path in GENERATIONS:
        request = draw(st.one_of(generations(descriptor), generations(descriptor), messages(descriptor)))
        sampling = request.sampling
        if MAX_ANSWERS < sampling.n <= 64:
            sampling.n = MAX_ANSWERS
    else:
        request = draw(messages(descriptor))
    data = request.SerializeToString()
    if draw(st.sampled_from((False, False, True))):
        data = draw(damaged(data))
    call = Call(path, data, cancel=path == ENDLESS or draw(st.integers(0, 19)) == 19)
    return call if path not in GENERATIONS else _shortened(call)


def _shortened(call: Call) -> Call:
    """Limits the answer of a request that decodes; of a field that comes twice the last value counts."""
    message = call.message
    if message is None or (message.sampling.HasField("max_tokens") and message.sampling.max_tokens <= MAX_TOKENS):
        return call
    limit = pb.GenerateRequest(sampling=pb.SamplingParameters(max_tokens=MAX_TOKENS))
    return Call(call.path, call.data + limit.SerializeToString(), call.cancel)
