"""What requests are called: by whoever sent them, and in engines."""

from __future__ import annotations

import re

_SCOPE = re.compile(r"[0-9a-f]{1,16} ")


def scoped_id(caller: int, request_id: str) -> str:
    """What engines call a request: ids are each caller's own, so that none finds another's by its id, ends it, or has
    it refused by taking that first. Clients cannot send the space. caller 0: nobody's, under the id itself."""
    return f"{caller:x} {request_id}" if caller else request_id


def unscoped(engine_id: str) -> str:
    """The client's own part, with what vLLM puts before and after it."""
    return _SCOPE.sub("", engine_id)
