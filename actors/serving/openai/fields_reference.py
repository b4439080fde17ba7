"""Writes the tables of fields in ``docs/openai.md`` from the rules the door refuses by:
``python -m outrider.actors.serving.openai.fields_reference``."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from outrider.actors.serving.openai.fields import (
    CHAT,
    COMPLETIONS,
    DETOKENIZE,
    TOKENIZE,
    Label,
    Refused,
    Rule,
    Rules,
    Works,
)

PATH = Path(__file__).parents[3] / "docs" / "openai.md"

BEGIN, END = "<!-- fields: written from actors/serving/openai/fields.py -->", "<!-- end of fields -->"

_ENDPOINTS = {"chat": CHAT, "completions": COMPLETIONS, "tokenize": TOKENIZE, "detokenize": DETOKENIZE}


def render(page: str) -> str:
    """The page with fresh tables between its marks."""
    return re.sub(
        f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda _: f"{BEGIN}\n{_tables()}{END}", page, flags=re.DOTALL
    )


def _tables() -> str:
    head = "| field | chat | completions | tokenize | detokenize | |\n|---|---|---|---|---|---|\n"
    names = dict.fromkeys(name for rules in _ENDPOINTS.values() for name in rules)
    rows = "".join(_row(name) for name in sorted(names, key=_order))
    inner = "".join(_inner_rows("", CHAT))
    return f"\n{head}{rows}\nInside them:\n\n| field | | |\n|---|---|---|\n{inner}\n"


def _row(name: str) -> str:
    marks = [_mark(rules.get(name)) for rules in _ENDPOINTS.values()]
    notes = dict.fromkeys(_note(rules[name]) for rules in _ENDPOINTS.values() if name in rules)
    return f"| `{name}` | {' | '.join(marks)} | {'; '.join(note for note in notes if note)} |\n"


def _inner_rows(path: str, rules: Rules) -> Iterator[str]:
    for name, rule in rules.items():
        where = f"{path}{name}"
        if path:
            yield f"| `{where}` | {_mark(rule)} | {_note(rule)} |\n"
        if isinstance(rule, Works) and rule.inner is not None:
            yield from _inner_rows(f"{where}[]." if rule.shape == "objects" else f"{where}.", rule.inner)


def _order(name: str) -> int:
    """Fields that work come first."""
    rules = [rules[name] for rules in _ENDPOINTS.values() if name in rules]
    return min((Works, Label, Refused).index(type(rule)) for rule in rules)


def _mark(rule: Rule | None) -> str:
    if rule is None:
        return ""
    return {Works: "works", Label: "taken, no effect", Refused: "refused"}[type(rule)]


def _note(rule: Rule) -> str:
    return rule.reason if isinstance(rule, Refused) else rule.note


if __name__ == "__main__":
    PATH.write_text(render(PATH.read_text()))
    sys.stdout.write(f"{PATH}\n")
