"""From what an operator types to a validated configuration: presets, configuration files, overrides, local copies."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from outrider.cluster.config import (
    CoLocatedConfig,
    ConfigError,
    DraftModelConfig,
    OutriderConfig,
    load_config,
    parse_config,
)
from outrider.deploy.models.store import BY_HUB_ID, PRESET_MODELS, find_copy

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True)
class Overrides:
    """Command-line options that change a configuration. None: leave as it is."""

    target: str | None = None
    """Checkpoint directory or hub id in place of ``target.model``."""

    drafter: str | None = None
    """Likewise for ``drafter.model``; only a draft_model drafter has one."""

    dtype: str | None = None
    """For the target and a draft model alike."""

    grpc_port: int | None = None
    http_port: int | None = None
    gateway: str | None = None
    """``off``: in place of ``serving.gateway``."""


def preset_names() -> list[str]:
    return sorted(Path(entry.name).stem for entry in _presets().iterdir() if entry.name.endswith(".yaml"))


def is_preset(name: str) -> bool:
    return name in preset_names()


def resolve_config(config_or_preset: str, overrides: Overrides | None = None) -> OutriderConfig:
    """The configuration for a preset's name or a YAML file's path, with overrides applied and checkpoints located.

    A preset's hub ids become local copies where ``outrider fetch`` made some; a file's are taken literally. Local
    checkpoint directories come back as absolute paths, since Ray's workers run elsewhere.

    Raises ConfigError: neither preset nor file, a wrong field, an override without a field, a missing checkpoint.
    """
    overrides = overrides or Overrides()
    from_preset = is_preset(config_or_preset)
    if from_preset:
        data = yaml.safe_load((_presets() / f"{config_or_preset}.yaml").read_text())
        config = parse_config(data, f"preset {config_or_preset}")
    elif Path(config_or_preset).is_file():
        config = load_config(config_or_preset)
    else:
        raise ConfigError(
            f"config: {config_or_preset!r} is neither a preset ({', '.join(preset_names())}) nor a file; "
            "give one of these names or the path of a YAML file"
        )
    tree = config.model_dump(exclude_unset=True)  # defaults that depend on the device are chosen later
    if from_preset:
        _use_fetched_copies(tree)
    _apply(tree, config, overrides)
    return _locate_checkpoints(parse_config(tree, config_or_preset))


def models_to_fetch(preset: str, overrides: Overrides) -> list[str]:
    """Models of a preset that have no local copy yet and that no override replaces."""
    config = resolve_config(preset)
    used = [config.target.model] if overrides.target is None else []
    if (drafter_model := config.drafter_model) is not None and overrides.drafter is None:
        used.append(drafter_model)
    if isinstance(config.drafter, DraftModelConfig):
        used += [each.model for each in config.drafter.also]
    # The path of a copy stands here in place of the hub id of a model that has been fetched.
    return [BY_HUB_ID[model].name for model in used if model in BY_HUB_ID]


def _presets() -> Any:
    return resources.files("outrider.deploy") / "presets"


def _apply(tree: dict[str, Any], config: OutriderConfig, overrides: Overrides) -> None:
    if overrides.drafter is not None and config.drafter_model is None:
        method = f"is of method {config.drafter.method}" if config.drafter else "section is missing"
        raise ConfigError(
            f"drafter: --drafter names a draft model, but the drafter {method} and has no model; "
            "leave --drafter out, or use a configuration whose drafter.method is draft_model"
        )
    if overrides.target is not None:
        tree["target"]["model"] = overrides.target
    if overrides.drafter is not None:
        tree["drafter"]["model"] = overrides.drafter
    if overrides.dtype is not None:
        tree["target"]["dtype"] = overrides.dtype
        if isinstance(config.drafter, DraftModelConfig):  # a co-located one has the target's
            for section in (tree["drafter"], *tree["drafter"].get("also", ())):
                section["dtype"] = overrides.dtype
    if overrides.gateway is not None:
        tree.setdefault("serving", {})["gateway"] = overrides.gateway
    for key in ("grpc_port", "http_port"):
        if (port := getattr(overrides, key)) is not None:
            serving = tree.setdefault("serving", {})
            if config.serving.gateway == "off":
                serving[key] = port
            else:
                serving["gateway"] = {**(serving.get("gateway") or {}), key: port}


def _use_fetched_copies(tree: dict[str, Any]) -> None:
    drafter = tree.get("drafter") or {}
    for section in (tree["target"], drafter, *drafter.get("also", ())):
        source = BY_HUB_ID.get(section.get("model", ""))
        if source is not None and (local := find_copy(source)) is not None:
            section["model"] = str(local)


def _locate_checkpoints(config: OutriderConfig) -> OutriderConfig:
    target = config.target.model_copy(update={"model": _locate(config.target.model, "target.model", "--target")})
    drafter = config.drafter
    if isinstance(drafter, DraftModelConfig | CoLocatedConfig) and (model := config.drafter_model) is not None:
        drafter = drafter.model_copy(update={"model": _locate(model, "drafter.model", "--drafter")})
    if isinstance(drafter, DraftModelConfig) and drafter.also:
        also = [
            each.model_copy(update={"model": _locate(each.model, f"drafter.also.{each.name}.model", None)})
            for each in drafter.also
        ]
        drafter = drafter.model_copy(update={"also": also})
    return config.model_copy(update={"target": target, "drafter": drafter})


def _locate(model: str, field: str, option: str | None) -> str:
    """An absolute path for a local checkpoint, a hub id as it is. option: that can name another."""
    path = Path(model).expanduser()
    by_option = "" if option is None else f" ({option} PATH)"
    fix = f"give a checkpoint directory{by_option}, or fetch one: outrider fetch {{{','.join(PRESET_MODELS)}}}"
    if not path.exists():
        if _HUB_ID.fullmatch(model) and not model.startswith((".", "~")):
            return model
        raise ConfigError(f"{field}: {model} does not exist; {fix}")
    if path.is_file():
        raise ConfigError(f"{field}: {model} is a file; {fix}")
    if not (path / "config.json").is_file():
        if os.path.sep not in model and _HUB_ID.fullmatch(model):
            return model  # a directory that happens to have a hub model's name
        raise ConfigError(f"{field}: {model} holds no config.json, so it is no checkpoint directory; {fix}")
    return str(path.resolve())
