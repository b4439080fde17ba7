"""Serve's log of a replica, kept alive while vLLM is imported."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import MemoryHandler

from outrider.actors.serve_seam import leans_on


@contextmanager
def serve_log_kept() -> Iterator[None]:
    """Around the first import of vLLM, which configures logging, and so has Python close every handler there is.

    A closed handler of Serve's has lost its file: it would keep each line in memory, for good, and write none.
    """
    leans_on.REPLICA.check()
    log = logging.getLogger(leans_on.SERVE_LOGGER)
    handlers = [handler for handler in log.handlers if isinstance(handler, MemoryHandler)]
    targets = [handler.target for handler in handlers]
    try:
        yield
    finally:
        for handler, target in zip(handlers, targets, strict=True):
            handler.setTarget(target)
            handler.flush()
