"""Checks the kind, size and nesting of a structured-output constraint. vLLM and its backends check the rest."""

from __future__ import annotations

import json
from typing import Any, Literal

from outrider.actors.replica_calls import RequestError

Mode = Literal["off", "json", "all"]

MAX_CONSTRAINT_BYTES = 64 << 10
"""Largest size of one constraint, as UTF-8."""

MAX_NESTING = 64
"""Largest nesting of objects and arrays in a schema, and of brackets in a regex or a grammar."""

TAG_NESTING = 16
"""Further levels of a structural tag around its schemas, as vLLM's tool parsers write them."""

MAX_ITEMS = 1 << 16
"""Largest ``minItems`` and ``maxItems``: guidance takes 100 bytes of memory for each item."""

MAX_BRANCHES = 1000
"""Most properties of one object of a schema, and most objects in one array such as ``anyOf``. guidance's compile time
grows with the square of their number: 4,000 properties take 2.4 s, 1,000 take 0.2 s."""

JSON_KINDS = frozenset({"json", "json_object", "choice"})
"""Kinds that the mode ``json`` serves, besides the structural tags that vLLM makes of tools."""


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
    """Raise RequestError for a constraint that is too large or nested too deeply.

    value: text, a schema as a dict, a choice's list of texts, or True.
    """
    try:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        if len(text.encode(errors="surrogatepass")) > MAX_CONSTRAINT_BYTES:
            raise RequestError(field, f"is larger than {MAX_CONSTRAINT_BYTES} bytes", "send a shorter one")
        if kind in ("json", "structural_tag"):
            _check_json(json.loads(text), MAX_NESTING if kind == "json" else MAX_NESTING + TAG_NESTING)
        elif kind in ("regex", "grammar"):
            _check_brackets(text)
    except RecursionError:
        raise RequestError(field, "is nested too deeply", "send a simpler constraint") from None
    except json.JSONDecodeError as error:
        raise RequestError(field, f"is not JSON: {error}", "send a JSON document as text") from None
    except ValueError as error:
        raise RequestError(field, str(error), "send a simpler constraint") from None


def _check_json(document: Any, most: int) -> None:
    """Raise ValueError for a document with more levels than most, or too many branches or items at one place."""
    level = [document]
    for _ in range(most + 1):
        level = [each for each in level if isinstance(each, dict | list)]
        for each in level:
            if len(each) > MAX_BRANCHES and (isinstance(each, dict) or any(isinstance(below, dict) for below in each)):
                raise ValueError(f"has more than {MAX_BRANCHES} properties or branches at one place")
            if isinstance(each, dict) and any(
                isinstance(count := each.get(key), int | float) and count > MAX_ITEMS
                for key in ("minItems", "maxItems")
            ):
                raise ValueError(f"has minItems or maxItems above {MAX_ITEMS}")
        level = [below for each in level for below in (each.values() if isinstance(each, dict) else each)]
    if any(isinstance(each, dict | list) for each in level):
        raise ValueError(f"is nested deeper than {most} levels")


def _check_brackets(text: str) -> None:
    """Raise ValueError for brackets that nest too deeply, those in strings and character classes counted as well."""
    depth = 0
    for character in text:
        depth = depth + 1 if character in "([{" else max(0, depth - (character in ")]}"))
        if depth > MAX_NESTING:
            raise ValueError(f"is nested deeper than {MAX_NESTING} levels")
