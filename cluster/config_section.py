"""Defines the base of all configuration sections, reads their YAML, and words their errors."""

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
TAGS = ("draft_model", "ngram", "suffix", "mlp_speculator", "co_located", "gateway_on", "gateway_off")
"""Tags of the unions' members, which occur in pydantic's paths and in no configuration."""

CoreSet = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
NodeLabels = Annotated[
    dict[
        Annotated[str, Field(pattern=rf"^(?:[a-z0-9.-]{{1,253}}/)?{_LABEL}$")],
        Annotated[str, Field(pattern=rf"^{_LABEL}$")],
    ],
    Field(max_length=32),
]
"""Type of labels of Ray's nodes, each with one value."""

FilePath = Annotated[str, Field(min_length=1), AfterValidator(lambda path: str(Path(path).expanduser().absolute()))]
"""Type of a path that processes with other working directories read. It becomes absolute."""


class ConfigError(ValueError):
    """Reports a configuration that cannot work. The message names the field and the fix."""


class Section(BaseModel):
    """Serves as base of every section: unknown keys are errors, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), use_attribute_docstrings=True)


class _Loader(yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader):  # type: ignore[misc]
    """Reads dates as text, since no value of a configuration is a date.

    lmformatenforcer, which vLLM imports, makes that change to PyYAML's own loader of the whole process.
    """


_Loader.add_constructor("tag:yaml.org,2002:timestamp", _Loader.construct_yaml_str)


class DuplicateKeyError(yaml.MarkedYAMLError):
    """Reports a key that a mapping has twice. PyYAML would take the last one."""


def read_yaml(text: str) -> Any:
    """Returns one decoded document. Raises YAMLError, or DuplicateKeyError, which is one."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _check_keys(node, set())
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _check_keys(node: yaml.Node, seen: set[yaml.Node]) -> None:
    if isinstance(node, yaml.ScalarNode) or node in seen:  # an alias may lead back to its own mapping
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
                problem = f"the key {key.value!r} occurs twice; keep one of them"
                raise DuplicateKeyError(problem=problem, problem_mark=key.start_mark)
            keys.add((key.tag, key.value))
        _check_keys(value, seen)


def explained(error: ValidationError) -> str:
    """Returns one line with the wrong fields of a validation error, by dotted path."""
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
            # An error between two sections names its field itself.
            lines.append(f"{where}: {message}{shown}" if parts else f"{message}{shown}")
    return "; ".join(lines)
