"""A server's processes, for tests that harm them: which is which, stopped, slowed, counted, and what each holds."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import psutil
import ray

from tests.support.cluster.serving import HANG_GUARD_S, Deployment, living_actors, wait_until

TURN_S = 0.2
"""The period of a process that is slowed: it runs for a part of it, and stands still for the rest."""


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stop a process for the time of the block. It goes on afterwards, if it has not ended."""
    process = psutil.Process(pid)
    process.suspend()
    try:
        yield
    finally:
        with suppress(psutil.NoSuchProcess):
            process.resume()


@contextmanager
def slowed(pid: int, share: float) -> Iterator[None]:
    """Let a process run for that share of the time only, for HANG_GUARD_S at most, and wholly afterwards."""
    over = threading.Event()
    thread = threading.Thread(target=_slow, args=(psutil.Process(pid), share, over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _slow(process: psutil.Process, share: float, over: threading.Event) -> None:
    give_up = time.monotonic() + HANG_GUARD_S
    with suppress(psutil.NoSuchProcess):
        try:
            while not over.is_set() and time.monotonic() < give_up:
                process.suspend()
                over.wait(TURN_S * (1 - share))
                process.resume()
                over.wait(TURN_S * share)
        finally:
            process.resume()


def engine_core(replica_pid: int) -> int | None:
    """Return the process of a replica's engine; None: there is none. Raises psutil.NoSuchProcess.

    vLLM names that process VLLM::EngineCore, but not always: setproctitle looks for the place of the title beside the
    first variable of the environment, and does nothing where that one was changed.
    """
    for child in psutil.Process(replica_pid).children():
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            command = " ".join(child.cmdline())
            if "EngineCore" in command or "multiprocessing.spawn" in command:
                return child.pid
    return None


ENGINE_CORE, PROXY, CONTROLLER = "engine core", "proxy", "controller"
INGRESS, TARGET, POOL_REPLICA = "Ingress", "Target", "DrafterPool"
DRAFTER, VERIFIER, REGISTRY = "Drafter", "Verifier", "Registry"
"""Kinds of processes, as processes() names them."""

PLACEMENT_GROUP = "placement group"


def processes(deployment: Deployment) -> dict[str, list[int]]:
    """Those that live, by what they are. Engine cores only of replicas that live."""
    found: dict[str, list[int]] = {}
    for name, pid in living_actors():
        found.setdefault(_kind(name), []).append(pid)
    for pid in deployment.replicas().values():
        with suppress(psutil.NoSuchProcess):
            if (core := engine_core(pid)) is not None:
                found.setdefault(ENGINE_CORE, []).append(core)
    return found


def counted(deployment: Deployment) -> Counter[str]:
    """What there is of each, and how many placement groups hold resources, or wait for them."""
    counts = Counter({kind: len(pids) for kind, pids in processes(deployment).items()})
    groups = ray.util.placement_group_table().values()
    counts[PLACEMENT_GROUP] = sum(group["state"] != "REMOVED" for group in groups)
    return counts


def wait_until_counted(deployment: Deployment, there: Counter[str], within_s: float) -> None:
    """Wait until the processes are those that there were, and no others."""
    seen = there

    def same() -> bool:
        nonlocal seen
        seen = counted(deployment)
        return seen == there

    try:
        wait_until(same, within_s, "all processes, and no more", every_s=0.2)
    except AssertionError as error:
        raise AssertionError(f"{error}: {dict(seen)}, where {dict(there)} were") from None


def _kind(actor: str) -> str:
    if "SERVE_PROXY" in actor:
        return PROXY
    if actor.startswith("SERVE_CONTROLLER"):
        return CONTROLLER
    if "Rank-" in actor:  # those of a drafter that was started again have its process in their names, too
        return actor.split(":")[0]
    return actor.split("#")[1] if "#" in actor else actor.split(":")[0]


def family(pid: int) -> list[psutil.Process]:
    """Return a process and all beneath it."""
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def alive(of: list[psutil.Process]) -> list[str]:
    found = []
    for process in of:
        with suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"{process.pid} {process.name()}")
    return found


@dataclass(frozen=True)
class Held:
    """Counts what a process holds: resident bytes, open files, threads."""

    kind: str
    memory: int
    files: int
    threads: int


MOST_GROWTH = Held("", 128 << 20, 32, 32)
"""The most that a process may grow over a time of faults.

A tiny model's KV cache, of 64 MiB, is touched bit by bit, and a process that is replaced is reached over other
connections.
"""


def held(deployment: Deployment) -> dict[int, Held]:
    """Return what each living process holds."""
    found = {}
    for kind, pids in processes(deployment).items():
        for process in map(psutil.Process, pids):
            with suppress(psutil.NoSuchProcess):
                found[process.pid] = Held(kind, process.memory_info().rss, process.num_fds(), process.num_threads())
    return found


def check_flat(deployment: Deployment, before: Mapping[int, Held], within_s: float) -> str:
    """Wait until whoever has lived since holds little more than then. Returns the most of each that any of them holds
    more, in words; fails with it."""
    said = ""

    def is_flat() -> bool:
        nonlocal said
        now = held(deployment)
        stayed = [(before[pid], each) for pid, each in now.items() if pid in before]
        assert stayed, "nobody has lived since"
        most = []
        flat = True
        for name in ("memory", "files", "threads"):
            grown, kind = max((getattr(b, name) - getattr(a, name), b.kind) for a, b in stayed)
            flat = flat and grown <= getattr(MOST_GROWTH, name)
            most.append(f"{grown / 2**20:+.1f} MiB ({kind})" if name == "memory" else f"{grown:+d} {name} ({kind})")
        said = f"{len(stayed)} processes lived on: {', '.join(most)}"
        return flat

    try:
        wait_until(is_flat, within_s, "memory and handles given back", every_s=1.0)
    except AssertionError as error:
        raise AssertionError(f"{error}: {said}") from None
    return said
