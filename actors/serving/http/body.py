"""A request's body: read up to a limit, decoded, and checked for what no model could take, whatever its fields mean."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from starlette.requests import Request

from outrider.actors.replica_calls import RequestError
from outrider.actors.serving.openai.errors import HttpError, HttpFailure

MAX_DEPTH = 128
"""Of nested objects and arrays. JSON schemas are the deepest thing that clients send; the engine takes 64."""

_INT64 = range(-(2**63), 2**63)


async def read_json_object(request: Request, max_bytes: int) -> dict[str, Any]:
    """Raises HttpError 413 or 415 for the envelope, RequestError for what is in it."""
    _check_headers(request, max_bytes)
    received = bytearray()
    async for chunk in request.stream():
        received += chunk
        if len(received) > max_bytes:
            raise _too_large(max_bytes)
    return decode_json_object(bytes(received))


def decode_json_object(raw: bytes) -> dict[str, Any]:
    """Raises RequestError, with the path of the value at fault where there is one."""
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


def check_values(body: dict[str, Any]) -> None:
    """Every number fits 64 bits and every text is Unicode, at a depth that recursion can take. Raises RequestError."""
    pending: list[tuple[str, Any, int]] = [("", body, 0)]
    while pending:
        path, value, depth = pending.pop()
        if isinstance(value, str):
            _check_text(path, value)
        elif isinstance(value, float):
            if not math.isfinite(value):
                raise RequestError(path, "is too large a number", "send a finite number")
        elif isinstance(value, int):
            if value not in _INT64:
                raise RequestError(path, "is too large a number", "send an integer of 64 bits")
        elif isinstance(value, (dict, list)):
            if depth == MAX_DEPTH:
                raise _too_deep(path.split(".")[0])
            if isinstance(value, dict):
                for key, item in value.items():
                    _check_text(path or "body", key)
                    pending.append((f"{path}.{key}" if path else key, item, depth + 1))
            else:
                pending.extend((f"{path}.{index}", item, depth + 1) for index, item in enumerate(value))


def _check_headers(request: Request, max_bytes: int) -> None:
    kind = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise HttpError(HttpFailure(415, f"content-type {kind[:60]!r} is not taken; send application/json"))
    if (encoding := request.headers.get("content-encoding", "identity").strip().lower()) != "identity":
        raise HttpError(HttpFailure(415, f"content-encoding {encoding[:60]!r} is not taken; send the body as it is"))
    length = request.headers.get("content-length", "0")
    if length.isascii() and length.isdigit() and int(length[:20]) > max_bytes:
        raise _too_large(max_bytes)


def _check_text(path: str, text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise RequestError(
            path.encode("utf-8", "replace").decode(), "holds half of a surrogate pair", "send whole characters"
        ) from None


def _not_json(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON number")


def _too_deep(field: str) -> RequestError:
    return RequestError(field, "is nested too deeply", f"send at most {MAX_DEPTH} levels")


def _too_large(max_bytes: int) -> HttpError:
    return HttpError(HttpFailure(413, f"the body is longer than {max_bytes} bytes (serving.max_request_bytes)"))


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    names = {list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "value")
