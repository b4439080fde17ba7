"""How much memory a serialised message may take, told before it is decoded: protobuf makes up to 40 bytes of one, of
empty messages in a list for example."""

from __future__ import annotations

from google.protobuf.descriptor import Descriptor, FieldDescriptor

SMALL_BYTES = 1 << 16
"""Whatever it holds, a message of so many bytes takes few megabytes. It is not looked at."""

FIELD_VALUES = 8
"""As many packed numbers weigh what a field does that stands by itself: a text, a message, an entry of a map."""

_FIXED_BYTES = {
    FieldDescriptor.TYPE_DOUBLE: 8,
    FieldDescriptor.TYPE_FIXED64: 8,
    FieldDescriptor.TYPE_SFIXED64: 8,
    FieldDescriptor.TYPE_FLOAT: 4,
    FieldDescriptor.TYPE_FIXED32: 4,
    FieldDescriptor.TYPE_SFIXED32: 4,
}
_TEXTS = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
_CONTINUED = bytes(range(0x80, 0x100))
"""Bytes that a varint does not end with."""

_VARINT, _FIXED64, _DELIMITED, _START_GROUP, _END_GROUP, _FIXED32 = range(6)


def num_values(data: bytes, message: Descriptor, most: int) -> int:
    """Numbers in packed lists, and FIELD_VALUES for every field. Counting ends beyond most, and where data is no such
    message, which is its decoder's to say."""
    total = 0
    pending = [(0, len(data), message)]
    try:
        while pending:
            at, end, descriptor = pending.pop()
            fields = descriptor.fields_by_number
            while at < end:
                total += FIELD_VALUES
                if total > most:
                    return total
                tag, at = _varint(data, at)
                kind = tag & 7
                if kind == _VARINT:
                    _, at = _varint(data, at)
                elif kind == _FIXED64:
                    at += 8
                elif kind == _FIXED32:
                    at += 4
                elif kind == _DELIMITED:
                    length, at = _varint(data, at)
                    start, at = at, at + length
                    field = fields.get(tag >> 3)
                    if field is None or field.type in _TEXTS:
                        continue
                    if field.message_type is not None:
                        pending.append((start, min(at, end), field.message_type))
                    else:
                        total += _num_packed(data[start:at], field)
                elif kind not in (_START_GROUP, _END_GROUP):
                    return total
    except IndexError:
        pass
    return total


def _num_packed(packed: bytes, field: FieldDescriptor) -> int:
    if (size := _FIXED_BYTES.get(field.type)) is not None:
        return len(packed) // size
    return len(packed.translate(None, _CONTINUED))


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Its value, and where it ends. Raises IndexError where data ends within it, or it is no varint."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise IndexError
