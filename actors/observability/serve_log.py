"""Keeps Serve's log of a replica alive while vLLM is imported there."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import MemoryHandler

SERVE_LOGGER = "ray.serve"


@contextmanager
def serve_log_kept() -> Iterator[None]:
    """Around the first import of vLLM, which configures logging, and so has Python close every handler there is.

    A closed handler of Serve's has lost its file: it would keep each line in memory, for good, and write none.
    """
    handlers = [handler for handler in logging.getLogger(SERVE_LOGGER).handlers if isinstance(handler, MemoryHandler)]
    targets = [handler.target for handler in handlers]
    try:
        yield
    finally:
        for handler, target in zip(handlers, targets, strict=True):
            handler.setTarget(target)
            handler.flush()
