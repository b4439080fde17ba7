"""What may be said about a request field, and how a body is held against it. Which is which: actors.http.fields."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from actors.generation import RequestError


@dataclass(frozen=True)
class Works:
    """The field does what its documentation says, in speculated rounds too.

    shape: what must be there before vLLM's own validation looks at it. inner: keys of the object, or of the objects in
    the list; None: free.
    """

    note: str = ""
    shape: Literal["any", "object", "objects"] = "any"
    inner: Mapping[str, Works | Label | Refused] | None = None


@dataclass(frozen=True)
class Label:
    """Taken and dropped: by its own definition it changes no answer."""

    note: str


@dataclass(frozen=True)
class Refused:
    """400 with the reason, unless the value asks for nothing: null, or one of neutral."""

    reason: str
    neutral: tuple[Any, ...] = field(default=())


Rule = Works | Label | Refused
Rules = Mapping[str, Rule]


def held_against(rules: Rules, body: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """The body without labels and without refused fields that ask for nothing.

    Raises RequestError naming the first field that is unknown, refused or of the wrong shape.
    """
    kept: dict[str, Any] = {}
    for name, value in body.items():
        where = f"{path}.{name}" if path else name
        rule = rules.get(name)
        if rule is None:
            raise _unknown(name, where, rules)
        if isinstance(rule, Refused):
            if value is not None and not any(_same(value, neutral) for neutral in rule.neutral):
                raise RequestError(where, f"is not supported: {rule.reason}", "leave it out")
        elif isinstance(rule, Works):
            kept[name] = _inside(rule, value, where)
    return kept


def _inside(rule: Works, value: Any, where: str) -> Any:
    if value is None:
        return value
    if rule.shape == "object" and not isinstance(value, dict):
        raise RequestError(where, "is no object", "send a JSON object")
    if rule.shape == "objects" and not isinstance(value, list):
        raise RequestError(where, "is no array", "send an array of JSON objects")
    if rule.inner is None:
        return value
    if isinstance(value, dict):
        return held_against(rule.inner, value, where)
    if isinstance(value, list):
        return [_item(rule, item, f"{where}.{index}") for index, item in enumerate(value)]
    return value


def _item(rule: Works, item: Any, where: str) -> Any:
    if isinstance(item, dict):
        assert rule.inner is not None
        return held_against(rule.inner, item, where)
    if rule.shape == "objects":
        raise RequestError(where, "is no object", "send a JSON object")
    return item


def _unknown(name: str, where: str, rules: Rules) -> RequestError:
    shown = name if len(name) <= 60 else name[:60] + "…"
    near = difflib.get_close_matches(shown, [key for key, rule in rules.items() if isinstance(rule, Works)], n=1)
    return RequestError(
        where if len(where) <= 120 else where[:120] + "…",
        f"{shown!r} is no field that is known here",
        f"did you mean {near[0]!r}?" if near else "leave it out",
    )


def _same(value: Any, neutral: Any) -> bool:
    """0 and 0.0 are the same, 0 and false are not."""
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)
