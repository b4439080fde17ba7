"""What is wrong with a configuration in words: every wrong field by its dotted path."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from cluster.co_located_config import CoLocatedConfig
from cluster.config_section import Section
from cluster.drafter_config import TAGS

_KEY = re.compile(r"([a-z_]+): ")


def explained(error: ValidationError) -> str:
    lines = []
    for item in error.errors():
        parts = [str(part) for part in item["loc"] if part not in TAGS]
        where = ".".join(parts) or "config"
        if item["type"] == "extra_forbidden":
            lines.append(f"{where}: {_unknown_key(parts)}")
        elif item["type"] == "missing":
            lines.append(f"{where}: required, but missing")
        else:
            message = item["msg"].removeprefix("Value error, ")
            if parts and _KEY.match(message):
                where, message = f"{where}.{message.partition(': ')[0]}", message.partition(": ")[2]
            found = item.get("input")
            shown = "" if isinstance(found, Mapping | list | Section) or _is_nan(found) else f" (found {found!r})"
            lines.append(f"{where}: {message}{shown}")
    return "; ".join(lines)


def _unknown_key(parts: list[str]) -> str:
    """parts: of the dotted path. A key that vLLM users know gets a better answer than one that is misspelt."""
    *section, key = parts
    if section == ["drafter"] and key in CoLocatedConfig.model_fields:
        return (
            "unknown key of this method in a drafter actor; remove it, or set placement: co_located, where vLLM has it"
        )
    if section == ["speculation"] and (key in CoLocatedConfig.model_fields or key == "placement"):
        return "unknown key here; it belongs into the drafter section"
    return "unknown key; remove it or check its spelling"


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)
