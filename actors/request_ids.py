"""Names of requests: checks what a client sends, and makes and reads the names that engines use."""

from __future__ import annotations

import re

_USABLE = re.compile(r"[!-~]{1,128}")
_SCOPE = re.compile(r"[0-9a-f]{1,16} ")


def is_usable_id(request_id: str) -> bool:
    """Return whether the id can travel in gRPC metadata and HTTP headers: 1 to 128 printable ASCII characters."""
    return _USABLE.fullmatch(request_id) is not None


def scoped_id(caller: int, request_id: str) -> str:
    """Return the engine's name of a request: each caller has its own ids and cannot reach another's.

    Clients cannot send the space. caller: 64 bits; 0: nobody's, the id itself.
    """
    return f"{caller:x} {request_id}" if caller else request_id


def unscoped(engine_id: str) -> str:
    """Return the client's own part, with what vLLM puts before and after it."""
    return _SCOPE.sub("", engine_id)
