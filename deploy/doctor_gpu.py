"""What ``outrider doctor --gpu`` looks at and measures: how GPUs are joined, what runs on them, and how long parts of a
round take there.

What nvidia-smi says is read here; what is measured (gpu_times) comes from a process of its own, which loads the
configured draft model. Nothing is served, and neither Ray nor the target is started.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

from outrider.cluster.config import DraftModelConfig, OutriderConfig
from outrider.cluster.device_defaults import with_device_defaults
from outrider.cluster.placement import V1_RUNNER
from outrider.deploy.doctor import Finding, fail, ok, warn

MEASURING_TIMEOUT_S = 1200.0
"""Loading a large draft model and capturing its graphs is nearly all of it."""

_MEASURE = "import sys; from outrider.deploy.gpu_times import main; main(sys.argv[1])"
_ENVIRONMENT = {**V1_RUNNER, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
_ACROSS_SOCKETS = "SYS"
"""As nvidia-smi names a path that leaves the socket."""

_ESCAPES = re.compile(r"\x1b\[[\d;]*m")
_NOTHING_HERE = "install NVIDIA's driver, or give the container its GPUs; without a GPU leave --gpu out"


@dataclass(frozen=True)
class Topology:
    """gpus: their numbers. joined: by pair, the lower number first, nvidia-smi's word for what is between them."""

    gpus: tuple[int, ...]
    joined: Mapping[tuple[int, int], str]

    def between(self, one: int, other: int) -> str:
        return self.joined.get((min(one, other), max(one, other)), "")


def parse_topology(text: str) -> Topology:
    """text: of ``nvidia-smi topo -m``. Raises ValueError where it holds no table of GPUs."""
    header: list[str] = []
    gpus: list[int] = []
    joined: dict[tuple[int, int], str] = {}
    for line in _ESCAPES.sub("", text).splitlines():
        cells = [cell.strip() for cell in line.split("\t")]
        if not header:
            header = cells if "GPU0" in cells[1:] else []
        elif re.fullmatch(r"GPU\d+", cells[0]):
            row = int(cells[0][3:])
            gpus.append(row)
            for name, cell in zip(header[1:], cells[1:], strict=False):
                if re.fullmatch(r"GPU\d+", name) and (column := int(name[3:])) > row:
                    joined[row, column] = cell
    if not gpus:
        raise ValueError("no table of GPUs in what nvidia-smi topo -m printed")
    return Topology(tuple(gpus), joined)


def visible_gpus(topology: Topology, variable: str | None) -> list[int]:
    """In the order in which processes see them. variable: CUDA_VISIBLE_DEVICES; GPUs by other names than numbers are
    taken to be all."""
    if variable is None or not re.fullmatch(r"\s*\d+(\s*,\s*\d+)*\s*", variable):
        return [] if variable == "" else list(topology.gpus)
    return [gpu for gpu in map(int, variable.split(",")) if gpu in topology.gpus]


def judge_topology(topology: Topology, visible: Sequence[int], target_ranks: int, drafter_ranks: int) -> Finding:
    """Ray gives out GPUs in their order, so on a machine that nothing else uses the first ones are the target's and the
    next ones the drafter's. WARN where a path between two of them leaves the socket."""
    subject = "topology"
    kinds: dict[str, list[str]] = {}
    for one, other in combinations(sorted(visible), 2):
        kinds.setdefault(topology.between(one, other) or "?", []).append(f"{one}-{other}")
    text = "; ".join(f"{kind}: {' '.join(pairs)}" for kind, pairs in sorted(kinds.items())) or "1 GPU"
    if len(visible) < target_ranks + drafter_ranks:
        return ok(subject, text)  # that they are too few is said elsewhere
    target, drafter = visible[:target_ranks], visible[target_ranks : target_ranks + drafter_ranks]
    text = f"target on GPU {_listed(target)}" + (f", drafter on {_listed(drafter)}" if drafter else "") + f" ({text})"
    apart = [f"{one}-{other}" for one, other in product(target, drafter) if _apart(topology, one, other)]
    split = [f"{one}-{other}" for side in (target, drafter) for one, other in combinations(side, 2)
             if _apart(topology, one, other)]  # fmt: skip
    if split:
        return warn(
            subject,
            f"{text}: ranks of one model are across sockets ({' '.join(split)})",
            _together(topology, visible, target_ranks + drafter_ranks),
        )
    if apart:
        return warn(
            subject,
            f"{text}: drafter and target are across sockets ({' '.join(apart)})",
            _together(topology, visible, target_ranks + drafter_ranks),
        )
    return ok(subject, text)


def _apart(topology: Topology, one: int, other: int) -> bool:
    return topology.between(one, other) == _ACROSS_SOCKETS


def _together(topology: Topology, visible: Sequence[int], count: int) -> str:
    """What to do about GPUs on two sockets: which ones are on one."""
    for first in visible:
        near = [gpu for gpu in visible if gpu == first or not _apart(topology, first, gpu)]
        if len(near) >= count:
            return f"serve with CUDA_VISIBLE_DEVICES={','.join(map(str, near[:count]))}, which are on one socket"
    return "no socket here has as many GPUs: use fewer ranks, or accept the longer path"


def parse_driver(text: str) -> tuple[str, str]:
    """Versions of the driver and of the newest CUDA it runs, from ``nvidia-smi``'s head; empty where not told."""
    driver, cuda = (re.search(rf"{name} Version:\s*([\d.]+)", text) for name in ("Driver", "CUDA"))
    return driver[1] if driver else "", cuda[1] if cuda else ""


def judge_versions(driver: str, driver_cuda: str, found: Mapping[str, Any]) -> Finding:
    """found: as `gpu_times.versions` has them."""
    subject, built_for = "GPU versions", found["cuda"]
    text = (
        f"driver {driver or '?'} for CUDA {driver_cuda or '?'}, torch {found['torch']}, Triton {found['triton'] or '?'}"
    )
    if found["nccl"]:
        text += f", NCCL {found['nccl']}"
    if built_for is None:
        return fail(subject, f"{text}: torch is a build without CUDA", "make setup ACCELERATOR=gpu")
    if not found["gpus"]:
        return fail(subject, f"{text}: torch sees no GPU", _NOTHING_HERE)
    if driver_cuda and _major(built_for) > _major(driver_cuda):
        return fail(
            subject, f"{text}: torch is built for CUDA {built_for}", "install a newer driver, or an older torch"
        )
    if not found["triton"]:
        return fail(subject, f"{text}: verification needs Triton", "pip install triton")
    kinds = sorted(set(found["gpus"]))
    return ok(subject, f"{text}, built for CUDA {built_for}; {len(found['gpus'])} x {', '.join(kinds)}")


def _major(version: str) -> int:
    return int(version.split(".")[0])


def judge_graphs(found: Mapping[str, Any]) -> Finding:
    """found: as `gpu_times.graphs` has it."""
    subject, sizes, rows = "drafter graphs", found["sizes"], found["max_rows"]
    if not sizes:
        return warn(subject, "none are captured: each step launches every kernel", "leave drafter.enforce_eager out")
    text = f"{found['mode']}, {len(sizes)} sizes: {_shown_sizes(sizes)} tokens; a draft step has {rows} rows at most"
    if "FULL" not in found["mode"]:
        return warn(subject, f"{text}; each step launches what attention is made of, layer by layer", _FULL)
    # Where all steps have them, a larger FULL graph does. Else it has as many rows as tokens, and no more than a step.
    if rows > max(sizes, default=0) if found["mode"] == "FULL" else rows not in sizes:
        fix = (
            "lower drafter.max_draft_rows (and drafter.max_num_seqs) to one of the sizes, or set "
            "drafter.engine_args.compilation_config.cudagraph_capture_sizes with that many"
        )
        return warn(subject, f"{text}, so the largest ones run without a FULL graph", fix)
    return ok(subject, text)


_FULL = (
    "leave drafter.engine_args.compilation_config.cudagraph_mode out; where it is, take another "
    "drafter.engine_args.attention_backend: this one has no full graphs of a decode step"
)


def judge_steps(steps: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """steps: as `gpu_times.draft_steps` has them, of one token a sequence; one finding each."""
    findings = []
    for step in steps:
        hits = step["graphs"]
        text = (
            f"{_ms(step)}; graphs hit: {', '.join(f'{name} tokens x{n}' for name, n in sorted(hits.items())) or 'none'}"
        )
        subject = f"draft step, {step['rows']} row{'s' if step['rows'] > 1 else ''}"
        fix = "see drafter graphs above: a size that is captured"
        if any(name.startswith("NONE ") for name in hits):
            findings.append(warn(subject, f"{text}: without a graph", fix))
        elif any(name.startswith("PIECEWISE ") for name in hits):
            findings.append(warn(subject, f"{text}: graphs of pieces, none of the whole step", fix))
        else:
            findings.append(ok(subject, text))
    if not findings:
        fix = "raise drafter.kv_cache_memory_bytes or drafter.gpu_memory_utilization"
        findings.append(fail("draft step", "the KV cache has no room for one sequence", fix))
    return findings


def judge_tail(tail: Sequence[Mapping[str, Any]], vocab_size: int) -> list[Finding]:
    """tail: as `gpu_times.sampler_tail` has it; one finding a batch size."""
    by_batch: dict[int, list[str]] = {}
    for entry in tail:
        with_top_p = f"top_p {entry['top_p']:g}" if entry["top_p"] < 1 else "plain"
        by_batch.setdefault(entry["batch"], []).append(f"{with_top_p} {_ms(entry)}")
    of = f"of {vocab_size} tokens"
    return [ok(f"sampler tail, batch {batch}", f"{', '.join(texts)} {of}") for batch, texts in by_batch.items()]


def judge_link(found: Mapping[str, Any]) -> Finding:
    """found: as `gpu_times.link_round_trip` has it."""
    least, most = f"{found['min_us']:.0f}", f"{found['max_us']:.0f}"
    round_trip = f"round trip {found['median_us']:.0f} us (min {least}, max {most})"
    return ok("link", f"{found['backend']}, {round_trip}, two processes of this machine")


def judge_measured(found: Mapping[str, Any], vocab_size: int) -> list[Finding]:
    """found: as `gpu_times.measured` has it, but for versions."""
    findings: list[Finding] = []
    if "graphs" in found:
        findings.append(judge_graphs(found["graphs"]))
    judges: dict[str, tuple[str, Any]] = {
        "steps": ("draft step", judge_steps),
        "tail": ("sampler tail", lambda tail: judge_tail(tail, vocab_size)),
        "link": ("link", lambda link: [judge_link(link)]),
    }
    for name, (subject, judge) in judges.items():
        if name not in found:
            findings.append(ok(subject, "no draft model in an actor of its own: nothing to measure"))
        elif isinstance(found[name], dict) and "error" in found[name]:
            problem, _, fix = found[name]["error"].partition("; ")
            findings.append(fail(subject, problem, fix or "mend what it says, and run this again"))
        else:
            findings += judge(found[name])
    return findings


def check_gpu(config: OutriderConfig, gpu: bool, vocab_size: int | None) -> tuple[list[Finding], dict[str, Any]]:
    """Findings, and the numbers behind them. gpu: of which build vLLM is. vocab_size: the target's; None: not known."""
    if not gpu:
        fix = "on a machine with a GPU: make setup ACCELERATOR=gpu; without one leave --gpu out"
        return [fail("GPU", "the installed vLLM is its CPU build", fix)], {}
    try:
        head, matrix = (_nvidia_smi(*options) for options in ((), ("topo", "-m")))
        topology = parse_topology(matrix)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return [fail("GPU", f"nvidia-smi does not say what is there ({error})", _NOTHING_HERE)], {}
    visible = visible_gpus(topology, os.environ.get("CUDA_VISIBLE_DEVICES"))
    drafter = config.drafter
    drafter_ranks = drafter.tensor_parallel_size if isinstance(drafter, DraftModelConfig) else 0
    findings = [judge_topology(topology, visible, config.target.num_ranks, drafter_ranks)]
    if vocab_size is None:
        fix = "fetch the target first, and give its directory"
        return [*findings, fail("sampler tail", "the target's config.json does not say its vocab_size", fix)], {}
    found = ask_gpu(with_device_defaults(config, gpu=True), "cuda", vocab_size, visible)
    if isinstance(found, Finding):
        return [*findings, found], {}
    findings.append(judge_versions(*parse_driver(head), found["versions"]))
    numbers = {"joined": {f"{one}-{other}": kind for (one, other), kind in topology.joined.items()}, **found}
    return [*findings, *judge_measured(found, vocab_size)], numbers


def ask_gpu(config: OutriderConfig, device: str, vocab_size: int, gpus: Sequence[int] = ()) -> dict[str, Any] | Finding:
    """`gpu_times.measured`, of a process of its own; a Finding where there is none. gpus: that may be used."""
    given = {
        "config": config.model_dump(mode="json"),
        "device": device,
        "vocab_size": vocab_size,
        "devices": [str(gpu) for gpu in gpus],
    }
    command = [sys.executable, "-c", _MEASURE, json.dumps(given)]
    environment = {**os.environ, **_ENVIRONMENT}
    try:
        asked = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=MEASURING_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return fail(
            "GPU", f"measuring takes over {MEASURING_TIMEOUT_S:g} s", "take a smaller drafter, or look at the GPU"
        )
    if asked.returncode != 0 or not asked.stdout.strip():
        said = asked.stderr.strip().splitlines()
        return fail(
            "GPU", said[-1] if said else f"measuring ended with {asked.returncode}", "make setup ACCELERATOR=gpu"
        )
    found: dict[str, Any] = json.loads(asked.stdout.splitlines()[-1])
    return found


def _nvidia_smi(*options: str) -> str:
    return subprocess.run(["nvidia-smi", *options], capture_output=True, text=True, timeout=20, check=True).stdout


def _ms(times: Mapping[str, Any]) -> str:
    return f"{times['median_ms']:.2f} ms (90th {times['p90_ms']:.2f})"


def _listed(gpus: Sequence[int]) -> str:
    return ", ".join(map(str, gpus))


def _shown_sizes(sizes: Sequence[int]) -> str:
    if len(sizes) <= 8:
        return ", ".join(map(str, sizes))
    return f"{', '.join(map(str, sizes[:4]))} … {', '.join(map(str, sizes[-2:]))}"
