"""A request's body: read up to a limit, decoded, and checked for what no model could take, whatever its fields mean."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any, NoReturn

from starlette.requests import Request

from outrider.actors.replica_calls import RequestError
from outrider.actors.serving.grpc.wire import FIELD_VALUES
from outrider.actors.serving.openai.errors import HttpError, HttpFailure
from outrider.cluster.limits import LimitsConfig

MAX_DEPTH = 128
"""Of nested objects and arrays. JSON schemas are the deepest thing that clients send; the engine takes 64."""

_COMMA = ord(",")
_INT64 = range(-(2**63), 2**63)


_TOKENS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)|[,\[{]', re.DOTALL)
"""A text, or what goes before a value. Possessive: nothing is kept for going back. A text without an end is one, too:
else it would be looked for again from each quote in it."""


async def read_json_object(request: Request, limits: LimitsConfig) -> dict[str, Any]:
    """Raises HttpError 413 or 415 for the envelope, RequestError for what is in it."""
    max_bytes = limits.max_request_bytes
    _check_headers(request, max_bytes)
    received = bytearray()
    async for chunk in request.stream():
        received += chunk
        if len(received) > max_bytes:
            raise _too_large(max_bytes)
    return decode_json_object(bytes(received), limits.max_request_values)


def decode_json_object(raw: bytes, max_values: int) -> dict[str, Any]:
    """max_values: most members of lists and objects; a text, a list or an object counts as FIELD_VALUES, as over gRPC.
    Raises RequestError, with the path of the value at fault where there is one."""
    if _has_more_values(raw, max_values):
        raise RequestError(
            "body", "holds too many values", f"send at most {max_values} in one request (limits.max_request_values)"
        )
    try:
        body = json.loads(raw.decode("utf-8"), parse_constant=_not_json)
    except UnicodeDecodeError as error:
        raise RequestError("body", f"is not UTF-8 (byte {error.start})", "send JSON in UTF-8") from None
    except RecursionError:
        raise _too_deep("body") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise RequestError("body", f"is not JSON: {error.msg} at {where}", "send a JSON object") from None
    except ValueError as error:  # NaN and the like, and numbers of thousands of digits
        raise RequestError("body", f"is not JSON: {error}", "send a JSON object") from None
    if not isinstance(body, dict):
        raise RequestError("body", f"is a JSON {_kind(body)}", "send a JSON object")
    check_values(body)
    return body


def _has_more_values(raw: bytes, most: int) -> bool:
    """Before they are made: decoded, an empty list takes thirty times its two bytes. Told of what is no JSON, too."""
    heavy = raw.count(b"[") + raw.count(b"{") + raw.count(b'"') // 2
    if raw.count(b",") + FIELD_VALUES * heavy <= most:
        return False
    values = 0
    for token in _TOKENS.finditer(raw):
        values += 1 if raw[token.start()] == _COMMA else FIELD_VALUES
        if values > most:
            return True
    return False


def check_values(body: dict[str, Any]) -> None:
    """Every number fits 64 bits and every text is Unicode, at a depth that recursion can take. Raises RequestError for
    the first that does not; where that is, is put in words then."""
    keys: list[Any] = []
    pending: list[Iterator[tuple[Any, Any]]] = [_members(body)]
    while pending:
        member = next(pending[-1], None)
        if member is None:
            pending.pop()
            if keys:
                keys.pop()
            continue
        key, value = member
        kind = type(value)
        if kind is int:
            if value not in _INT64:
                raise RequestError(_path(keys, key), "is too large a number", "send an integer of 64 bits")
        elif kind is str:
            _check_text(value, keys, key)
        elif kind is float:
            if not math.isfinite(value):
                raise RequestError(_path(keys, key), "is too large a number", "send a finite number")
        elif kind is dict or kind is list:
            if len(pending) == MAX_DEPTH:
                raise _too_deep(_path([], keys[0]))
            keys.append(key)
            pending.append(_members(value, keys))


def _members(value: dict[str, Any] | list[Any], path: list[Any] | None = None) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, list):
        yield from enumerate(value)
        return
    for key, item in value.items():
        _check_text(key, path or [], None)
        yield key, item


def _path(keys: list[Any], key: Any = None) -> str:
    """Of a member, or of what keys lead to; fit to be sent."""
    steps = [*keys] if key is None else [*keys, key]
    return ".".join(map(str, steps)).encode("utf-8", "replace").decode() or "body"


def refused_envelope(content_type: str, content_encoding: str) -> HttpFailure | None:
    """Of a body that is to be JSON, by what its header says of it."""
    # Pages of other origins may send what has no type, or another one, without asking first.
    kind = content_type.split(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        found = f"{kind[:60]!r} is not taken" if kind else "is missing"
        return HttpFailure(415, f"content-type {found}; send application/json")
    if (encoding := content_encoding.strip().lower()) != "identity":
        return HttpFailure(415, f"content-encoding {encoding[:60]!r} is not taken; send the body as it is")
    return None


def _check_headers(request: Request, max_bytes: int) -> None:
    kind, encoding = request.headers.get("content-type", ""), request.headers.get("content-encoding", "identity")
    if (failure := refused_envelope(kind, encoding)) is not None:
        raise HttpError(failure)
    length = request.headers.get("content-length", "0")
    if length.isascii() and length.isdigit() and int(length[:20]) > max_bytes:
        raise _too_large(max_bytes)


def _check_text(text: str, keys: list[Any], key: Any) -> None:
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise RequestError(_path(keys, key), "holds half of a surrogate pair", "send whole characters") from None


def _not_json(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON number")


def _too_deep(field: str) -> RequestError:
    return RequestError(field, "is nested too deeply", f"send at most {MAX_DEPTH} levels")


def _too_large(max_bytes: int) -> HttpError:
    return HttpError(HttpFailure(413, f"the body is longer than {max_bytes} bytes (limits.max_request_bytes)"))


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    names = {list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "value")
