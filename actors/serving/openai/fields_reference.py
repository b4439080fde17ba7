"""Writes the tables of fields in ``docs/openai.md`` from the rules the door refuses by:
``python -m outrider.actors.serving.openai.fields_reference``."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from outrider.actors.serving.openai.door import BY_ENDPOINT
from outrider.actors.serving.openai.fields import CHAT, Label, Refused, Rule, Rules, Works
from outrider.actors.serving.openai.responses_fields import INPUT_ITEMS, PICTURE_PARTS, RESPONSES, TEXT_PARTS, TOOLS

PATH = Path(__file__).parents[3] / "docs" / "openai.md"

BEGIN, END = "<!-- fields: written from actors/serving/openai/fields.py -->", "<!-- end of fields -->"


def render(page: str) -> str:
    """The page with fresh tables between its marks."""
    return re.sub(
        f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda _: f"{BEGIN}\n{_tables()}{END}", page, flags=re.DOTALL
    )


def _tables() -> str:
    head = f"| field | {' | '.join(BY_ENDPOINT)} | |\n{'|---' * (len(BY_ENDPOINT) + 2)}|\n"
    names = dict.fromkeys(name for rules in BY_ENDPOINT.values() for name in rules)
    rows = "".join(_row(name) for name in sorted(names, key=_order))
    inner = "".join(_inner_rows("", CHAT))
    of_responses = "".join(_inner_rows("", {name: RESPONSES[name] for name in ("text", "reasoning")}))
    for what, kinds in (("input", INPUT_ITEMS), ("input[].content", {**TEXT_PARTS, **PICTURE_PARTS}), ("tools", TOOLS)):
        for kind, rules in kinds.items():
            of_responses += "".join(_inner_rows(f"{what}[{kind}].", rules))
    columns = "| field | | |\n|---|---|---|\n"
    return (
        f"\n{head}{rows}\nInside them:\n\n{columns}{inner}\n"
        f"Inside those of responses, where they are not the same:\n\n{columns}{of_responses}\n"
    )


def _row(name: str) -> str:
    marks = [_mark(rules.get(name)) for rules in BY_ENDPOINT.values()]
    notes = dict.fromkeys(_note(rules[name]) for rules in BY_ENDPOINT.values() if name in rules)
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
    rules = [rules[name] for rules in BY_ENDPOINT.values() if name in rules]
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
