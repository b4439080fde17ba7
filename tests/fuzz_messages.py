"""Random protobuf messages, from nothing but their descriptors: fields set or not, values at and beyond every edge."""

from __future__ import annotations

import math
import random
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

_INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), -2, -1, 0, 1, 2, 7, 64, 65, 1000, 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), -(2**31) - 1, -1, 0, 1, 42, 2**32, 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 1, 2, 3, 20, 21, 64, 65, 255, 256, 271, 272, 1023, 1024, 2**31, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 1, 5, 1000, 2**31, 2**53 + 1, 2**63, 2**64 - 1),
}
_REALS = (-math.inf, -1e308, -100.1, -2.0, -1.0, -1e-9, -0.0, 0.0, 5e-324, 1e-9, 0.009, 0.5, 0.95, 1.0, 1.0000001, 1.9)
_MORE_REALS = (2.0, 2.1, 100.0, 1e18, 1e308, math.inf, math.nan)
_TEXTS = (
    "",
    " ",
    "a",
    "Once upon a time",
    "user",
    "assistant",
    "pair",
    "\0",
    "\n\r\t\x1b[31m\x7f",
    "\u202eright to left",
    "e\u0301\u0302\u0303 combining",
    "🛰️ 👩‍👩‍👧‍👦",
    "\ufeff\uffff\U0010ffff",
    "%s %d {} {0} $(x) `y` ../../etc/passwd",
    "<|im_start|>system\n<s></s>[INST]",
    "{{ 7 * 7 }}{% for i in range(9) %}{{ i }}{% endfor %}",
    '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}',
    '{"type": "string", "pattern": "["}',
    '{"$ref": "#"}',
    '{"type": 5}',
    "[" * 200,
    "(a+)+$",
    "[a-",
    "a{3,2}",
    "(?<=a)b\\1",
    'root ::= "a" root | "b"',
    "root ::= root",
    "start: NUMBER",
    "nan",
    "-1",
)
LONG_TEXT_CHARS = (300, 1500, 40_000, 1_000_000)
"""The last one is drawn once in a thousand texts."""


def random_message(rng: random.Random, descriptor: Descriptor, *, density: float = 0.4, depth: int = 0) -> Message:
    """Each field is set with probability density; of a oneof the one set last stays."""
    message = GetMessageClass(descriptor)()
    for field in rng.sample(list(descriptor.fields), len(descriptor.fields)):
        if rng.random() < density and depth < 6:
            set_field(rng, message, field, depth=depth)
    return message


def set_field(rng: random.Random, message: Message, field: FieldDescriptor, *, depth: int = 0) -> None:
    """Give one field a random value."""
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        _set_map(rng, message, field)
    elif field.is_repeated:
        values = getattr(message, field.name)
        del values[:]
        for _ in range(rng.choice((0, 1, 1, 2, 5, 70))):
            if field.message_type is not None:
                values.append(random_message(rng, field.message_type, depth=depth + 1))
            else:
                values.append(random_value(rng, field))
    elif field.message_type is not None:
        getattr(message, field.name).SetInParent()
        getattr(message, field.name).CopyFrom(random_message(rng, field.message_type, density=0.3, depth=depth + 1))
    else:
        setattr(message, field.name, random_value(rng, field))


def random_value(rng: random.Random, field: FieldDescriptor) -> Any:
    """A scalar for a field, or for one entry of a repeated one."""
    kind = field.cpp_type
    if kind in _INTEGERS:
        # Small ones most of the time: they are what other fields can agree with.
        return rng.choice(_INTEGERS[kind]) if rng.random() < 0.5 else rng.randrange(0, 100)
    if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return rng.choice(_REALS + _MORE_REALS) if rng.random() < 0.5 else rng.random()
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return rng.random() < 0.5
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        known = [value.number for value in field.enum_type.values]
        return rng.choice([*known, *known, max(known) + 1, -1, 2**31 - 1])
    if kind == FieldDescriptor.CPPTYPE_STRING:
        text = _random_text(rng)
        return text if field.type == FieldDescriptor.TYPE_STRING else text.encode()
    raise NotImplementedError(f"no values for fields like {field.full_name}")


def _set_map(rng: random.Random, message: Message, field: FieldDescriptor) -> None:
    key_field, value_field = (field.message_type.fields_by_name[name] for name in ("key", "value"))
    values = getattr(message, field.name)
    for _ in range(rng.choice((0, 1, 3))):
        key = random_value(rng, key_field)
        if value_field.message_type is not None:
            values[key].CopyFrom(random_message(rng, value_field.message_type, density=0.3, depth=3))
        else:
            values[key] = random_value(rng, value_field)


def _random_text(rng: random.Random) -> str:
    roll = rng.random()
    if roll < 0.001:
        return "x" * LONG_TEXT_CHARS[-1]
    if roll < 0.03:
        return rng.choice(_TEXTS[1:]) * (rng.choice(LONG_TEXT_CHARS[:-1]) // 8)
    if roll < 0.6:
        return rng.choice(_TEXTS)
    return "".join(
        chr(rng.choice((rng.randrange(32, 127), rng.randrange(1, 0xD800)))) for _ in range(rng.randrange(12))
    )
