"""Writes logs as JSON lines, with the request's id on every line about a request.

Serve writes the lines of ingress and target itself, in JSON when its LoggingConfig says so. Ranks, engine and drafters
take ``json_lines.json``: vLLM's processes find it by vLLM's own variable, a drafter without vLLM by ``configure``. Keys
are those of Ray's JSON logs; ``outrider_request_id`` is the id that the client knows (``request_id`` is Serve's own).
"""

from __future__ import annotations

import asyncio
import json
import logging
import logging.config
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from outrider.actors.request_ids import unscoped

CONFIG_PATH_VARIABLE = "VLLM_LOGGING_CONFIG_PATH"
REQUEST_ID_KEY = "outrider_request_id"
JSON_LINES = Path(__file__).with_name("json_lines.json")

_NOT_EXTRA = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_ENGINE_SUFFIX = re.compile(r"-[0-9a-f]{8}$")
"""Suffix by which vLLM makes a request's id unique."""

_request_id: ContextVar[str | None] = ContextVar("id of the request that this task is about", default=None)


def configure() -> None:
    """Configures a process that nobody else does: JSON lines where its environment says so, else text."""
    if os.environ.get(CONFIG_PATH_VARIABLE) == str(JSON_LINES):
        logging.config.dictConfig(json.loads(JSON_LINES.read_text()))
    else:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")


def about(request_id: str) -> Mapping[str, str]:
    """Returns ``extra`` for a line about one request; empty where `note_request` has put an id on every line.

    request_id: the engine's. With n > 1 each answer has its number and ``_`` before the client's id.
    """
    return {} if _request_id.get() else {REQUEST_ID_KEY: unscoped(_ENGINE_SUFFIX.sub("", request_id))}


def note_request(request_id: str) -> None:
    """Puts the request's id on all lines that this task, and what it starts, logs from now on."""
    make = logging.getLogRecordFactory()
    if not getattr(make, "adds_request_id", False):

        def make_with_id(*args: Any, **kwargs: Any) -> logging.LogRecord:
            record = make(*args, **kwargs)
            if (noted := _request_id.get()) is not None:
                setattr(record, REQUEST_ID_KEY, noted)
            return record

        make_with_id.adds_request_id = True  # type: ignore[attr-defined]
        logging.setLogRecordFactory(make_with_id)
    _request_id.set(request_id)


@contextmanager
def request_line(logger: logging.Logger, request_id: str) -> Iterator[None]:
    """Surrounds a request and logs one line at its end: what became of it and how long it took."""
    before = _request_id.get()
    note_request(request_id)
    started_s, outcome = time.monotonic(), "done"
    try:
        yield
    except (asyncio.CancelledError, GeneratorExit):
        outcome = "cancelled"
        raise
    except Exception as error:
        outcome = type(error).__name__  # its text may show what the client sent
        raise
    finally:
        seconds = time.monotonic() - started_s
        note_request(request_id)  # a generator may end in another task than it began
        fields = {"outcome": outcome, "seconds": round(seconds, 6)}
        logger.info("request %s: %s, %.3f s", request_id, outcome, seconds, extra=fields)
        _request_id.set(before)


class JsonLines(logging.Formatter):
    """Formats a record as one JSON object; what does not fit JSON is given as text."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {"asctime": self.formatTime(record), "message": record.getMessage()}
        line |= {key: getattr(record, key) for key in ("levelname", "name", "filename", "lineno", "process")}
        if record.exc_info:
            line["exc_text"] = self.formatException(record.exc_info)
        line |= {key: value for key, value in vars(record).items() if key not in _NOT_EXTRA}
        return json.dumps(line, default=str)
