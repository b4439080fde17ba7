"""What a constraint (JSON schema, regex, grammar, choice, structural tag) may cost, and how one ends that costs more.

Pure: no xgrammar, no vLLM. `check_size` is for the door; `Allowance` is kept by the process that makes a request's
masks; an `Ending` is what a client is told of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from outrider.actors.grammars.refusals import Reason, refused

Mode = Literal["off", "json", "all"]

MAX_CONSTRAINT_BYTES = 64 << 10
"""Of one constraint, as UTF-8."""

MAX_NESTING = 64
"""Levels of objects and arrays in a schema or a structural tag; of brackets in a regex or a grammar."""

TAG_NESTING = 8
"""Levels of a structural tag around the schemas in it."""

JSON_KINDS = frozenset({"json", "json_object", "choice"})
"""What the mode ``json`` takes. A structural tag made of tools is JSON between two texts: see check_kind."""

_ENDING = "outrider.structured_outputs:"
_OPENING, _CLOSING = "([{", ")]}"


@dataclass(frozen=True)
class Bounds:
    """Times are of processor time, so that a busy machine makes nobody guilty.

    A request's masks, and its tokens' way through the grammar, may take mask_burst_s at once, and mask_refill_s a mask
    in the long run. step_wait_s, of wall clock: the longest that a step waits for those of its requests that the
    machine gives no core.
    """

    compile_s: float = 2.0
    compile_bytes: int = 256 << 20
    """Memory that compiling may take beyond what the process had."""

    refused_s: float = 20.0
    """Of one caller, a minute: compiling that came to nothing."""

    keep_bytes: int = 64 << 20
    """What a compiled grammar may hold in the end."""

    mask_burst_s: float = 0.1
    mask_refill_s: float = 0.002
    matcher_bytes: int = 128 << 20
    """Memory that one request's way through its grammar may take."""

    @property
    def step_wait_s(self) -> float:
        return max(10.0, 100 * self.mask_burst_s)

    @classmethod
    def of(cls, serving: Mapping[str, Any]) -> Bounds:
        """serving: the section of the configuration."""
        return cls(
            compile_s=serving["structured_output_compile_s"],
            refused_s=serving["structured_output_refused_s"],
            mask_burst_s=serving["structured_output_mask_ms"] / 1000,
        )


class Allowance:
    """Of one request: a bucket of processor time that each mask fills a little."""

    def __init__(self, burst_s: float, refill_s: float) -> None:
        self._burst_s, self._refill_s = burst_s, refill_s
        self.left_s = burst_s

    def spend(self, used_s: float, masks: int = 1) -> bool:
        """For so many masks. False: overdrawn."""
        self.left_s = min(self._burst_s, self.left_s - used_s + masks * self._refill_s)
        return self.left_s > 0


@dataclass(frozen=True)
class Ending:
    """Why a request's constraint ended it. It travels from the engine's process as the answer's stop_reason."""

    problem: str
    reason: Reason
    retry_after_s: float | None = None
    """Of one that was not looked at, since its caller had too many refused."""

    @property
    def is_clients(self) -> bool:
        """False: not the constraint's fault but the server's; worth a retry."""
        return self.reason != "server"

    def stop_reason(self) -> str:
        return _ENDING + json.dumps([self.problem, self.reason, self.retry_after_s])

    @classmethod
    def of(cls, stop_reason: object) -> Ending | None:
        """None for any other stop_reason."""
        if not isinstance(stop_reason, str) or not stop_reason.startswith(_ENDING):
            return None
        return cls(*json.loads(stop_reason.removeprefix(_ENDING)))


FIX = "send a simpler constraint"


def check_size(field: str, kind: str, value: Any) -> None:
    """value: text, a schema as a dict, a choice's list of texts, or True. Linear in its size, with an early end.

    Raises RequestError naming the field.
    """
    size = 0
    for part in _texts(value):
        size += len(part) if part.isascii() else len(part.encode(errors="surrogatepass"))
        if size > MAX_CONSTRAINT_BYTES:
            fix = "send a shorter one, or split the request"
            raise refused("size", field, f"is larger than {MAX_CONSTRAINT_BYTES} bytes", fix)
    if isinstance(value, str) and kind in ("regex", "grammar") and _brackets(value) > MAX_NESTING:
        raise refused("nesting", field, f"nests brackets deeper than {MAX_NESTING} levels", FIX)
    if isinstance(value, str) and kind in ("json", "structural_tag"):
        most = MAX_NESTING if kind == "json" else MAX_NESTING + TAG_NESTING
        if _brackets(value) > most:  # those inside strings counted as well
            _check_depth(field, value, most)
    if isinstance(value, dict) and _depth(value) > MAX_NESTING:
        raise refused("nesting", field, f"is nested deeper than {MAX_NESTING} levels", FIX)


def check_kind(field: str, kind: str, mode: Mode) -> None:
    """What ``serving.structured_output`` lets in. Raises RequestError."""
    if mode == "off":
        raise refused(
            "kind", field, "is not served here: serving.structured_output is off", "ask for JSON in the prompt instead"
        )
    if mode == "json" and kind not in JSON_KINDS:
        raise refused(
            "kind",
            field,
            f"is not served here: serving.structured_output is json, and this is a {kind}",
            "send a JSON schema",
        )


def _texts(value: Any) -> Any:
    """Every text and number in value, whatever its depth; brackets, colons and commas as one."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            yield "{}"
            for key, inner in item.items():
                yield str(key)
                pending.append(inner)
        elif isinstance(item, list | tuple):
            yield "[]"
            pending.extend(item)
        else:
            yield str(item)


def _brackets(text: str) -> int:
    """How deep brackets nest, those in strings and classes counted as well."""
    depth = deepest = 0
    for character in text:
        if character in _OPENING:
            depth += 1
            deepest = max(deepest, depth)
        elif character in _CLOSING:
            depth = max(0, depth - 1)
    return deepest


def _depth(value: Any) -> int:
    """Of objects and arrays."""
    deepest, pending = 0, [(value, 1)]
    while pending:
        item, level = pending.pop()
        if isinstance(item, dict | list):
            deepest = max(deepest, level)
            inner = item.values() if isinstance(item, dict) else item
            pending.extend((below, level + 1) for below in inner)
    return deepest


def _check_depth(field: str, text: str, most: int) -> None:
    try:
        too_deep = _depth(json.loads(text)) > most
    except RecursionError:
        too_deep = True
    except ValueError as error:
        raise refused("invalid", field, f"is not JSON: {error}", "send a JSON document as text") from None
    if too_deep:
        raise refused("nesting", field, f"is nested deeper than {most} levels", FIX)
