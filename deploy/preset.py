"""Resolves a preset or a configuration file, command-line overrides and local checkpoints to a configuration."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.cluster.config import ConfigError, DraftModelConfig, OutriderConfig, load_config, parse_config
from outrider.deploy.models.store import BY_HUB_ID, PRESET_MODELS, find_copy

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")

_PRESETS = Path(__file__).parent / "presets"


@dataclass(frozen=True)
class Overrides:
    """Holds command-line options that change a configuration. None leaves a value as it is."""

    target: str | None = None
    """Checkpoint directory or hub id in place of ``target.model``."""

    drafter: str | None = None
    """Checkpoint in place of ``drafter.model``, for a drafter that is a model."""

    dtype: str | None = None
    """Type of target and draft model."""

    grpc_port: int | None = None
    http_port: int | None = None


def preset_names() -> list[str]:
    return sorted(path.stem for path in _PRESETS.glob("*.yaml"))


def is_preset(name: str) -> bool:
    return name in preset_names()


def resolve_config(config_or_preset: str, overrides: Overrides | None = None) -> OutriderConfig:
    """Returns the configuration of a preset's name or a YAML file's path, with overrides and located checkpoints.

    A preset's hub ids become local copies where ``outrider fetch`` made some; a file's are taken literally. Local
    checkpoint directories come back as absolute paths, since Ray's workers run elsewhere.

    Raises ConfigError: neither preset nor file, a wrong field, an override without a field, a missing checkpoint.
    """
    overrides = overrides or Overrides()
    from_preset = is_preset(config_or_preset)
    if not from_preset and not Path(config_or_preset).is_file():
        raise ConfigError(
            f"config: {config_or_preset!r} is neither a preset ({', '.join(preset_names())}) nor a file; "
            "give one of these names or the path of a YAML file"
        )
    config = load_config(_PRESETS / f"{config_or_preset}.yaml" if from_preset else config_or_preset)
    if overrides.drafter is not None and config.drafter_model is None:
        raise ConfigError("drafter: --drafter names a draft model, and the drafter section has none; leave it out")
    tree = config.model_dump(exclude_unset=True)  # defaults that depend on the device are chosen later
    sections = {"target": tree["target"]}
    if config.drafter_model is not None:
        sections["drafter"] = tree["drafter"]
    for name, section in sections.items():
        source = BY_HUB_ID.get(section["model"]) if from_preset else None
        if (given := getattr(overrides, name, None)) is not None:
            section["model"] = given
        elif source is not None and (copy := find_copy(source)) is not None:
            section["model"] = str(copy)
        section["model"] = locate(section["model"], f"{name}.model")
        if overrides.dtype is not None and (name == "target" or isinstance(config.drafter, DraftModelConfig)):
            section["dtype"] = overrides.dtype  # a co-located drafter has the target's
    _set_ports(tree, config, overrides)
    return parse_config(tree, config_or_preset)


def _set_ports(tree: dict[str, Any], config: OutriderConfig, overrides: Overrides) -> None:
    """Sets the public ports: the gateway's, or without one Serve's."""
    ports = {"grpc_port": overrides.grpc_port, "http_port": overrides.http_port}
    given = {name: port for name, port in ports.items() if port is not None}
    if not given:
        return
    serving = tree.setdefault("serving", {})
    if config.serving.gateway == "off":
        serving.update(given)
    else:
        serving["gateway"] = {**(serving.get("gateway") or {}), **given}


def locate(model: str, field: str) -> str:
    """Returns an absolute path for a local checkpoint, a hub id as it is. Raises ConfigError."""
    path = Path(model).expanduser()
    if (path / "config.json").is_file():
        return str(path.resolve())
    if _HUB_ID.fullmatch(model) and not path.is_file() and (not path.exists() or os.path.sep not in model):
        return model  # a directory of the same name does not matter
    what = "does not exist" if not path.exists() else "is a file" if path.is_file() else "holds no config.json"
    raise ConfigError(
        f"{field}: {model} {what}, so it is no checkpoint directory; give a checkpoint directory, or fetch one: "
        f"outrider fetch {{{','.join(PRESET_MODELS)}}}"
    )
