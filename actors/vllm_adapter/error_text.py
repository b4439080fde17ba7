"""Removes clients' text from vLLM's logs, and shortens vLLM's error messages."""

from __future__ import annotations

import logging
import traceback

_MAX_CHARACTERS = 300
_LOGGERS_OF_REQUESTS = (
    "vllm.entrypoints",
    "vllm.parser",
    "vllm.reasoning",
    "vllm.renderers",
    "vllm.tool_parsers",
    "vllm.v1.structured_output",
)


def keep_client_text_out_of_logs() -> None:
    """Removes values and exception messages from vLLM's warnings and errors about requests, in this process."""
    for handler in logging.getLogger("vllm").handlers:
        handler.addFilter(_remove_client_text)


def _remove_client_text(record: logging.LogRecord) -> bool:
    """Removes the values of a record that may hold a client's text. A logging filter, so it returns True."""
    if record.levelno >= logging.WARNING and record.name.startswith(_LOGGERS_OF_REQUESTS):
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            frames = "".join(traceback.format_tb(error.__traceback__))
            record.msg = f"{record.msg} ({type(error).__name__})\n{frames}"
        record.args = record.exc_info = record.exc_text = None
    return True


def shorten(text: str) -> str:
    """Returns the text of a vLLM error on one line, short enough for a client."""
    text = " ".join(text.split()).rstrip(".")
    return text if len(text) <= _MAX_CHARACTERS else text[:_MAX_CHARACTERS] + "…"


def last_line(error: Exception) -> str:
    """Returns the last line of an error. A rank's error has its traceback before it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
