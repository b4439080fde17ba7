"""Which versions have served, why each began and why it ended. Pure, in plain values for status and metrics."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any

from outrider.actors.learning.gate import Difference, Verdict

MOST_SHOWN = 8
"""Of versions, the latest."""

SERVES, REPLACED, WITHDRAWN, REVERTED = "serves", "replaced", "withdrawn", "reverted"
STATES = (SERVES, REPLACED, WITHDRAWN, REVERTED)
"""A better one took its place; it turned out worse than the one before; somebody went back."""


@dataclass
class _Served:
    number: int
    step: int
    began_unix_s: float
    verdict: Verdict | None
    again: int | None
    state: str = SERVES
    since: Difference | None = None


class History:
    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """clock: seconds of Unix time."""
        self._clock = clock
        self._served: deque[_Served] = deque(maxlen=MOST_SHOWN)

    def began(self, number: int, step: int, verdict: Verdict | None = None, again: int | None = None) -> None:
        """verdict: that let it in. again: the former version whose tensors it has."""
        self._served.append(_Served(number, step, self._clock(), verdict, again))

    def ended(self, state: str, since: Difference | None = None) -> None:
        """The one that began last. since: how it did on texts that came meanwhile, where that is why."""
        self._served[-1].state, self._served[-1].since = state, since

    def rows(self, kept: Container[int]) -> list[dict[str, Any]]:
        """The latest last. kept: numbers that can be gone back to."""
        return [
            {
                "number": each.number,
                "state": each.state,
                "kept": each.number in kept,
                "again": each.again,
                "step": each.step,
                "began_unix_s": each.began_unix_s,
                "verdict": verdict_row(each.verdict),
                "since": _difference_row(each.since),
            }
            for each in self._served
        ]


def verdict_row(verdict: Verdict | None) -> dict[str, Any] | None:
    if verdict is None:
        return None
    texts = {"recent": verdict.recent, "past": verdict.past, "general": verdict.general}
    return {"reason": verdict.reason, **{name: _difference_row(each) for name, each in texts.items()}}


def _difference_row(difference: Difference | None) -> dict[str, Any] | None:
    """margin None: too few texts to say."""
    if difference is None:
        return None
    margin = difference.margin if math.isfinite(difference.margin) else None
    mean = difference.mean if math.isfinite(difference.mean) else 0.0
    return {"mean": mean, "margin": margin, "texts": difference.texts}


def status_of(learning: Mapping[str, Any]) -> dict[str, Any]:
    """DrafterLearning of the public API, as a nested dict. learning: LearningMember.status(), whose trainer has been
    heard of."""
    trainer = learning["trainer"]
    return {
        "drafting": learning["version"],
        "serving": trainer["version"],
        "steps": trainer["steps"],
        "tokens": trainer["tokens"],
        "refused": dict(trainer["refused"]),
        **_known({"last_comparison": _verdict(trainer["last_verdict"])}),
        "versions": [
            {
                "number": row["number"],
                "state": f"DRAFTER_VERSION_STATE_{row['state'].upper()}",
                "kept": row["kept"],
                "step": row["step"],
                "began_at": _timestamp(row["began_unix_s"]),
                **_known(
                    {"again": row["again"], "verdict": _verdict(row["verdict"]), "since": _difference(row["since"])}
                ),
            }
            for row in trainer["versions"]
        ],
    }


def _verdict(row: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if row is None:
        return None
    return {"reason": row["reason"], **_known({name: _difference(row[name]) for name in ("recent", "past", "general")})}


def _difference(row: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return None if row is None else _known(row)


def _known(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if value is not None}


def _timestamp(unix_s: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(unix_s))
