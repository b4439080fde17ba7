"""What every section of the configuration is made of, how its YAML is read, and how its errors are told."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_KEY = re.compile(r"([A-Za-z_.]+): ")
TAGS = ("draft_model", "ngram", "suffix", "co_located", "gateway_on", "gateway_off")
"""Tags of the unions' members, which stand in pydantic's paths and in no configuration."""

CoreSet = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
NodeLabels = Annotated[
    dict[
        Annotated[str, Field(pattern=rf"^(?:[a-z0-9.-]{{1,253}}/)?{_LABEL}$")],
        Annotated[str, Field(pattern=rf"^{_LABEL}$")],
    ],
    Field(max_length=32),
]
"""Labels of Ray's nodes, each with its one value."""

FilePath = Annotated[str, Field(min_length=1), AfterValidator(lambda path: str(Path(path).expanduser().absolute()))]
"""A path that another process reads, whose working directory may be another."""


class ConfigError(ValueError):
    """A configuration that cannot work. The message names the field and the fix."""


class Section(BaseModel):
    """The base of every section: unknown keys are errors, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), use_attribute_docstrings=True)


_YAML = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader


class StandsTwice(yaml.MarkedYAMLError):
    """A mapping has a key twice, of which YAML itself would take the last."""


def read_yaml(text: str) -> Any:
    """One document. Raises YAMLError, StandsTwice among them."""
    loader = _YAML(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _check_keys(node, set())
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _check_keys(node: yaml.Node, seen: set[yaml.Node]) -> None:
    if isinstance(node, yaml.ScalarNode) or node in seen:  # an alias may lead to where it stands
        return
    seen.add(node)
    if isinstance(node, yaml.SequenceNode):
        for entry in node.value:
            _check_keys(entry, seen)
        return
    keys: set[tuple[str, str]] = set()
    for key, value in node.value:
        if isinstance(key, yaml.ScalarNode):
            if (key.tag, key.value) in keys:
                raise StandsTwice(problem=f"{key.value!r} stands twice; keep one of them", problem_mark=key.start_mark)
            keys.add((key.tag, key.value))
        _check_keys(value, seen)


def explained(error: ValidationError) -> str:
    """The wrong fields of a validation error by their dotted paths, in one line."""
    lines = []
    for item in error.errors():
        parts = [str(part) for part in item["loc"] if part not in TAGS]
        where = ".".join(parts) or "config"
        if item["type"] == "extra_forbidden":
            hint = ""
            if parts[:-1] in (["target"], ["drafter"]):
                hint = f"; an engine argument of vLLM's belongs into {parts[0]}.engine_args"
            lines.append(f"{where}: unknown key; remove it or check its spelling{hint}")
        elif item["type"] == "missing":
            lines.append(f"{where}: required, but missing")
        else:
            message = item["msg"].removeprefix("Value error, ")
            if parts and _KEY.match(message):
                where, message = f"{where}.{message.partition(': ')[0]}", message.partition(": ")[2]
            found = item.get("input")
            is_nan = isinstance(found, float) and math.isnan(found)
            shown = "" if isinstance(found, Mapping | list | Section) or is_nan else f" (found {found!r})"
            # What is wrong between two sections names its field itself.
            lines.append(f"{where}: {message}{shown}" if parts else f"{message}{shown}")
    return "; ".join(lines)
