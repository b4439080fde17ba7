"""Keeps Serve's log of a replica alive while vLLM is imported."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import MemoryHandler

SERVE_LOGGER = "ray.serve"
"""Serve's logger, whose handler buffers lines for a file."""


@contextmanager
def serve_log_kept() -> Iterator[None]:
    """Restores the targets of Serve's log handlers after the first import of vLLM.

    vLLM configures logging, and Python then closes every handler. A closed MemoryHandler has lost its file: it would
    buffer lines for ever and write none.
    """
    log = logging.getLogger(SERVE_LOGGER)
    handlers = [handler for handler in log.handlers if isinstance(handler, MemoryHandler)]
    targets = [handler.target for handler in handlers]
    try:
        yield
    finally:
        for handler, target in zip(handlers, targets, strict=True):
            handler.setTarget(target)
            handler.flush()
