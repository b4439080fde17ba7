"""What a replica checks of a structured-output constraint before vLLM reads it: whether its kind is served, its size,
its nesting, and JSON schema keywords that no backend enforces.

vLLM checks the rest when the request reaches its engine, and picks the backend (xgrammar, else guidance).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

from outrider.actors.replica_calls import RequestError

Mode = Literal["off", "json", "all"]

MAX_CONSTRAINT_BYTES = 64 << 10
"""Of one constraint, as UTF-8."""

MAX_NESTING = 64
"""Levels of objects and arrays in a schema; of brackets in a regex or a grammar."""

TAG_NESTING = 16
"""Levels of a structural tag around the schemas in it, as vLLM's tool parsers write them."""

MAX_ITEMS = 1 << 16
"""Of ``minItems`` and ``maxItems``: guidance takes 100 bytes of memory for each."""

JSON_KINDS = frozenset({"json", "json_object", "choice"})
"""What the mode ``json`` serves, besides the structural tags that vLLM makes of tools."""

# fmt: off
UNENFORCED = frozenset({
    "not", "if", "then", "else", "dependentSchemas", "dependentRequired", "dependencies", "contains", "minContains",
    "maxContains", "uniqueItems", "$dynamicRef",
})
# fmt: on
"""JSON schema keywords that xgrammar ignores and guidance refuses."""

_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_SUBSCHEMAS = ("items", "prefixItems", "additionalProperties", "propertyNames", "allOf", "anyOf", "oneOf")


def check_kind(field: str, kind: str, mode: Mode) -> None:
    """Raise RequestError for a kind of constraint that ``serving.structured_output`` does not serve."""
    if mode == "off":
        raise RequestError(
            field, "is not served here: serving.structured_output is off", "ask for JSON in the prompt instead"
        )
    if mode == "json" and kind not in JSON_KINDS:
        raise RequestError(
            field, f"is not served here: serving.structured_output is json, and this is a {kind}", "send a JSON schema"
        )


def check_bounds(field: str, kind: str, value: Any) -> None:
    """Raise RequestError naming field for a constraint that is too large or nested too deeply, and for a schema with a
    keyword that no backend enforces. value: text, a schema as a dict, a choice's list of texts, or True."""
    try:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise _too_deep(field, MAX_NESTING) from None
    if len(text) > MAX_CONSTRAINT_BYTES or len(text.encode(errors="surrogatepass")) > MAX_CONSTRAINT_BYTES:
        raise RequestError(
            field, f"is larger than {MAX_CONSTRAINT_BYTES} bytes", "send a shorter one, or split the request"
        )
    if kind in ("json", "structural_tag"):
        try:
            value = json.loads(text)
        except ValueError as error:
            raise RequestError(field, f"is not JSON: {error}", "send a JSON document as text") from None
        except RecursionError:
            raise _too_deep(field, MAX_NESTING) from None
        most = MAX_NESTING if kind == "json" else MAX_NESTING + TAG_NESTING
        if _depth(value) > most:
            raise _too_deep(field, most)
        for keyword, given in _keywords(value) if kind == "json" else ():
            if keyword in UNENFORCED:
                raise RequestError(field, f"has the keyword {keyword}, which is not enforced here", "leave it out")
            if keyword in ("minItems", "maxItems") and isinstance(given, int | float) and given > MAX_ITEMS:
                raise RequestError(field, f"has {keyword} above {MAX_ITEMS}", "send a smaller number")
    elif kind in ("regex", "grammar") and _brackets(text) > MAX_NESTING:
        raise _too_deep(field, MAX_NESTING)


def _too_deep(field: str, most: int) -> RequestError:
    return RequestError(field, f"is nested deeper than {most} levels", "send a simpler constraint")


def _brackets(text: str) -> int:
    """How deep brackets nest, those in strings and character classes counted as well."""
    depth = deepest = 0
    for character in text:
        if character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}":
            depth = max(0, depth - 1)
    return deepest


def _depth(value: Any) -> int:
    """Levels of objects and arrays."""
    deepest, pending = 0, [(value, 1)]
    while pending:
        item, level = pending.pop()
        if isinstance(item, dict | list):
            deepest = max(deepest, level)
            pending.extend((below, level + 1) for below in (item.values() if isinstance(item, dict) else item))
    return deepest


def _keywords(schema: Any) -> Iterator[tuple[str, Any]]:
    """All keywords of a schema and its subschemas, with their values; not the names of properties, and nothing inside
    of other values."""
    if isinstance(schema, list):
        for each in schema:
            yield from _keywords(each)
    if isinstance(schema, dict):
        yield from schema.items()
        for name in _MAPS:
            if isinstance(named := schema.get(name), dict):
                yield from _keywords(list(named.values()))
        for name in _SUBSCHEMAS:
            yield from _keywords(schema.get(name))
