"""Keeps what clients send out of vLLM's logs, and shortens it in vLLM's error messages."""

from __future__ import annotations

import logging
import traceback

_MOST = 300
_ABOUT_REQUESTS = (
    "vllm.entrypoints",
    "vllm.parser",
    "vllm.reasoning",
    "vllm.renderers",
    "vllm.tool_parsers",
    "vllm.v1.structured_output",
)


def keep_out_of_logs() -> None:
    """From now on vLLM's warnings and errors about requests have no values in them in this process, and their
    exceptions no messages."""
    for handler in logging.getLogger("vllm").handlers:
        handler.addFilter(without_client_text)


def without_client_text(record: logging.LogRecord) -> bool:
    """Take the values out of a record that may hold a client's."""
    if record.levelno >= logging.WARNING and record.name.startswith(_ABOUT_REQUESTS):
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            frames = "".join(traceback.format_tb(error.__traceback__))
            record.msg = f"{record.msg} ({type(error).__name__})\n{frames}"
        record.args = record.exc_info = record.exc_text = None
    return True


def shortened(text: str) -> str:
    """Return what an error of vLLM's says, on one line that a client may read."""
    text = " ".join(text.split()).rstrip(".")
    return text if len(text) <= _MOST else text[:_MOST] + "…"
