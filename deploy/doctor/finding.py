"""One line of a check-up, and what a list of them amounts to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from cluster.config import ConfigError


class Level(StrEnum):
    OK = "OK"
    WARN = "WARN"
    """It will start, worse than it could."""

    FAIL = "FAIL"
    """It will not start, or will not work."""


@dataclass(frozen=True)
class Finding:
    level: Level
    subject: str
    text: str
    fix: str = ""
    """What to do about it; empty where all is well."""


def ok(subject: str, text: str) -> Finding:
    return Finding(Level.OK, subject, text)


def warn(subject: str, text: str, fix: str) -> Finding:
    return Finding(Level.WARN, subject, text, fix)


def fail(subject: str, text: str, fix: str) -> Finding:
    return Finding(Level.FAIL, subject, text, fix)


def judged(subject: str, text: str, check: Callable[[], object]) -> Finding:
    """OK with text, or what check raises as a ConfigError: ``field: problem; fix``."""
    try:
        check()
    except ConfigError as error:
        problem, _, fix = str(error).partition("; ")
        return fail(subject, problem, fix or "change the configuration")
    return ok(subject, text)


def worst(findings: Iterable[Finding]) -> Level:
    order = list(Level)
    return max((finding.level for finding in findings), key=order.index, default=Level.OK)
