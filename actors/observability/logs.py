"""Logs as JSON lines, with the request's id on every line about a request.

Serve writes the lines of ingress and target itself, in JSON when its LoggingConfig says so. Ranks, engine and drafters
take ``json_lines.json``: vLLM's processes find it by vLLM's own variable, a drafter without vLLM by ``configure``. Keys
are those of Ray's JSON logs; ``outrider_request_id`` is the id by which the client knows the request (``request_id`` is
taken: Serve gives every call an id of its own).
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
from typing import TYPE_CHECKING, Any

from outrider.actors.request_ids import unscoped

if TYPE_CHECKING:  # a drafter's loop, which logs, runs without pydantic
    from outrider.cluster.config import ServingConfig

CONFIG_PATH_VARIABLE = "VLLM_LOGGING_CONFIG_PATH"
REQUEST_ID_KEY = "outrider_request_id"

_JSON_LINES = Path(__file__).with_name("json_lines.json")
_TEXT = "%(asctime)s %(name)s %(levelname)s %(message)s"
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_ENGINE_SUFFIX = re.compile(r"-[0-9a-f]{8}$")
"""What vLLM adds to a request's id to make it unique."""

_request_id: ContextVar[str | None] = ContextVar("id of the request that this task is about", default=None)


def environment(serving: ServingConfig) -> dict[str, str]:
    """What processes outside Serve need to log as configured."""
    return {CONFIG_PATH_VARIABLE: str(_JSON_LINES)} if serving.log_format == "json" else {}


def configure() -> None:
    """For a process that nobody has configured: JSON lines where its environment says so, else text."""
    if os.environ.get(CONFIG_PATH_VARIABLE) == str(_JSON_LINES):
        logging.config.dictConfig(json.loads(_JSON_LINES.read_text()))
    else:
        logging.basicConfig(level=logging.INFO, format=_TEXT)


def about(request_id: str) -> Mapping[str, str]:
    """``extra`` of a line about one request. request_id: the engine's. Of n answers it has the number and ``_`` before
    the client's id. Empty where `note_request` has put an id on every line."""
    if _request_id.get() is not None:
        return {}
    return {REQUEST_ID_KEY: unscoped(_ENGINE_SUFFIX.sub("", request_id))}


def note_request(request_id: str) -> None:
    """Lines that this task, and what it starts, logs from now on are about this request."""
    if not getattr(logging.getLogRecordFactory(), "knows_requests", False):
        _teach_factory()
    _request_id.set(request_id)


@contextmanager
def request_line(logger: logging.Logger, request_id: str) -> Iterator[None]:
    """Around all of a request: one line at its end, with what became of it and how long it took."""
    before = _request_id.get()
    note_request(request_id)
    started_s = time.monotonic()
    outcome = "done"
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


def _teach_factory() -> None:
    make = logging.getLogRecordFactory()

    def make_with_id(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        request_id = _request_id.get()
        if request_id is not None:
            setattr(record, REQUEST_ID_KEY, request_id)
        return record

    make_with_id.knows_requests = True  # type: ignore[attr-defined]
    logging.setLogRecordFactory(make_with_id)


class JsonLines(logging.Formatter):
    """One JSON object a record; what does not fit JSON is given as text."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "asctime": self.formatTime(record),
            "levelname": record.levelname,
            "name": record.name,
            "message": record.getMessage(),
            "filename": record.filename,
            "lineno": record.lineno,
            "process": record.process,
        }
        if record.exc_info:
            line["exc_text"] = self.formatException(record.exc_info)
        line.update((key, value) for key, value in vars(record).items() if key not in _STANDARD)
        return json.dumps(line, default=str)
