"""The one line that explains a failed start, out of the tracebacks Ray, Serve and vLLM wrap around it. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

_ERROR = re.compile(r"^(?:[A-Za-z_]\w*\.)*(?P<type>[A-Za-z_]\w*(?:Error|Exception|Exit|Interrupt))(?:: (?P<text>.*))?$")
_LOG_PREFIX = re.compile(
    r"^(?:\x1b\[[\d;]*m)?(?:\([^)]*\)(?:\x1b\[[\d;]*m)?\s*)?(?:(?:ERROR|INFO|WARNING|CRITICAL)\s[\d: -]+\[[^\]]*\]\s?)?"
)
_END = re.compile(
    r'^\s*(?:For further information|\[type=|File ".*", line|Traceback|The above exception|During handling|$)'
)
_ELSEWHERE = re.compile(
    r"root cause above|Engine core initialization failed|WorkerProc initialization failed|died unexpectedly"
)

MOST_LINES = 4


def explain(message: str, logs: Iterable[str] = ()) -> str:
    """The last exception of a traceback as ``text``, on one line, its type named when it is not ours.

    Where that one only says that the cause is in a log, the last other exception of ``logs`` (their texts).
    """
    text = _last_exception(message)
    if text is None or _ELSEWHERE.search(text):
        for log in logs:
            cause = _last_exception(log)
            if cause is not None and not _ELSEWHERE.search(cause):
                return cause
    return text if text is not None else _squeeze(message)


def _last_exception(text: str) -> str | None:
    lines = [_LOG_PREFIX.sub("", line) for line in text.splitlines()]
    for index in range(len(lines) - 1, -1, -1):
        found = _ERROR.match(lines[index].strip())
        if found is None or _ELSEWHERE.search(lines[index]) or (found["text"] or "").startswith("Traceback"):
            # What points to another place is used only when nothing else is said.
            continue
        said = [found["text"] or ""]
        for line in lines[index + 1 : index + MOST_LINES]:
            if _END.match(line):
                break
            said.append(line.strip())
        joined = _squeeze(" ".join(said))
        return joined if found["type"] in ("ConfigError", "RequestError") and joined else f"{found['type']}: {joined}"
    for line in reversed(lines):
        if _ELSEWHERE.search(line):
            return _squeeze(line)
    return None


def _squeeze(text: str) -> str:
    squeezed = " ".join(text.split())
    return squeezed if len(squeezed) <= 600 else squeezed[:600] + " …"
