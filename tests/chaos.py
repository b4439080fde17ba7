"""Faults at random under a load of real clients, and what may not come of them.

A call that is cut short has a status, UNAVAILABLE, and there was a fault that took with it what the call ran on; what
it had said until then was right; asked again, it is answered. Nothing else is lost, and no token is wrong.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import grpc
import psutil

from outrider.deploy.client.sync_client import OutriderError
from tests.reference import GREEDY, Choice, Coupled
from tests.serving import HANG_GUARD_S, Deployment, living_actors, wait_until

TOP_K = 4
"""Of sampled calls whose tokens no seed tells: each has to be one of so many."""

ANSWERED_WITHIN_S = 300.0
"""After the first attempt: a target that loads anew on cores that are shared with all others may be waited for."""

AFTERMATH_S = 30.0
"""Beyond that all targets are whole again: connections and routers learn of it one after another."""


@dataclass(frozen=True)
class Kind:
    """What is asked for. choice: whose tokens the answer's are; None: any among the likeliest."""

    name: str
    options: dict[str, Any]
    choice: Choice | None = None


KINDS = (
    Kind("greedy", GREEDY.options(), GREEDY),
    Kind("coupled", Coupled(seed=31).options(), Coupled(seed=31)),
    Kind("coupled, top_p", Coupled(32, 0.7, 0.95).options(), Coupled(32, 0.7, 0.95)),
    Kind("rejection", {"temperature": 1.0, "top_k": TOP_K, "verification": "rejection"}),
    Kind("block", {"temperature": 1.0, "top_k": TOP_K, "verification": "block"}),
)


@dataclass
class Attempt:
    started: float
    tokens: list[int] = field(default_factory=list)
    ended: float = 0.0
    error: OutriderError | None = None


@dataclass
class Call:
    kind: Kind
    prompt: list[int]
    max_tokens: int
    leaves_after: int | None
    """Messages after which the client goes; None: it stays."""

    attempts: list[Attempt] = field(default_factory=list)
    answered: bool = False


@dataclass
class Fault:
    name: str
    at: float
    cuts: bool
    """What runs on it is lost."""


class Clients:
    """Each asks one call after the other, and again what failed, until told to stop."""

    def __init__(self, deployment: Deployment, number: int, seed: int) -> None:
        self._client = deployment.client
        self._stopping = threading.Event()
        self.calls: list[Call] = []
        self.crashed: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._run, args=(random.Random(f"{seed}-{n}"),), daemon=True) for n in range(number)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> bool:
        """No more calls; those that are asked have their time. Returns whether all came to an end."""
        self._stopping.set()
        give_up = time.monotonic() + ANSWERED_WITHIN_S + HANG_GUARD_S
        for thread in self._threads:
            thread.join(max(0.0, give_up - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self, choose: random.Random) -> None:
        try:
            while not self._stopping.is_set():
                number = choose.randrange(24)
                prompt = [(number * 11 + position * 5) % 250 for position in range(8 + 9 * (number % 8))]
                leaves = choose.randrange(1, 6) if choose.random() < 0.1 else None
                call = Call(choose.choice(KINDS), prompt, choose.choice((24, 96, 200)), leaves)
                self.calls.append(call)
                self._ask_until_answered(call)
        except BaseException as error:
            self.crashed.append(error)
            raise

    def _ask_until_answered(self, call: Call) -> None:
        give_up = time.monotonic() + ANSWERED_WITHIN_S
        while not call.answered and time.monotonic() < give_up:
            attempt = Attempt(time.monotonic())
            call.attempts.append(attempt)
            try:
                options = {"max_tokens": call.max_tokens, "ignore_eos": True, "timeout_s": HANG_GUARD_S}
                with self._client.stream(call.prompt, **options, **call.kind.options) as stream:
                    for number, message in enumerate(stream, 1):
                        attempt.tokens += message.token_ids
                        if number == call.leaves_after:
                            break
                call.answered = True
            except OutriderError as error:
                attempt.error = error
                time.sleep(0.2)
            attempt.ended = time.monotonic()


class Faults:
    """One at a time, a few seconds apart. No target falls while another is down: then there would be no service."""

    def __init__(self, deployment: Deployment, seed: int, *, cutting: bool) -> None:
        """cutting: also those that take with them what runs on them."""
        self._deployment = deployment
        self._choose = random.Random(seed)
        self.done: list[Fault] = []
        self.over_at = float("inf")
        self._kinds: dict[str, tuple[int, bool, Callable[[], bool]]] = {
            "drafter killed": (6, False, lambda: self._kill(self._drafter())),
            "drafter stopped": (4, False, lambda: self._stop(self._drafter(), 12.0)),
            "verifier stopped": (3, False, lambda: self._stop(self._actor("Verifier:"), 3.0)),
            "registry killed": (2, False, lambda: self._kill(self._actor("Registry:"))),
            "controller killed": (1, False, lambda: self._kill(self._actor("SERVE_CONTROLLER_ACTOR"))),
            "engine core killed": (2, True, lambda: self._kill_target(self._engine_core)),
            "verifier killed": (2, True, lambda: self._kill_target(lambda pid: self._actor("Verifier:"))),
            "target replica killed": (1, True, lambda: self._kill_target(lambda pid: pid)),
            "ingress killed": (1, True, lambda: self._kill(self._actor("#Ingress#"))),
        }

        if not cutting:
            self._kinds = {name: kind for name, kind in self._kinds.items() if not kind[1]}

    def run(self, seconds: float, pause_s: tuple[float, float] = (2.0, 8.0)) -> None:
        over = time.monotonic() + seconds
        while time.monotonic() < over:
            time.sleep(self._choose.uniform(*pause_s))
            names = list(self._kinds)
            (name,) = self._choose.choices(names, [self._kinds[each][0] for each in names])
            _, cuts, strike = self._kinds[name]
            at = time.monotonic()
            with suppress(ProcessLookupError, psutil.NoSuchProcess):
                if strike():
                    self.done.append(Fault(name, at, cuts))

    def whole_again(self, within_s: float) -> None:
        """Wait until all targets are; what failed until then may have failed of the last fault."""
        wait_until(lambda: all_targets_are_whole(self._deployment), within_s, "all targets are whole", every_s=0.5)
        self.over_at = time.monotonic()

    def _pids(self, part: str) -> list[int]:
        return sorted(pid for name, pid in living_actors() if part in name)

    def _actor(self, part: str) -> int | None:
        found = self._pids(part)
        return self._choose.choice(found) if found else None

    def _drafter(self) -> int | None:
        return self._actor("Drafter:")

    def _engine_core(self, replica_pid: int) -> int | None:
        return engine_core(replica_pid)

    def _kill_target(self, part_of: Callable[[int], int | None]) -> bool:
        if not all_targets_are_whole(self._deployment):
            return False
        return self._kill(part_of(self._choose.choice(sorted(self._deployment.replicas().values()))))

    def _kill(self, pid: int | None) -> bool:
        if pid is None:
            return False
        os.kill(pid, signal.SIGKILL)
        return True

    def _stop(self, pid: int | None, longest_s: float) -> bool:
        if pid is None:
            return False
        os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(self._choose.uniform(0.5, longest_s))
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        return True


def engine_core(replica_pid: int) -> int | None:
    """Its process; None: there is none. Raises psutil.NoSuchProcess.

    vLLM names that process VLLM::EngineCore, but not always: setproctitle looks for the place of the title beside the
    first variable of the environment, and does nothing where that one was changed.
    """
    for child in psutil.Process(replica_pid).children():
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            command = " ".join(child.cmdline())
            if "EngineCore" in command or "multiprocessing.spawn" in command:
                return child.pid
    return None


def all_targets_are_whole(deployment: Deployment) -> bool:
    """Every process of each, and the front door knows them: a dead engine is found out some seconds later."""
    replicas = deployment.replicas()
    verifiers = sum(name.startswith("Verifier:") for name, _ in living_actors())
    try:
        cores = [engine_core(pid) for pid in replicas.values()]
        return len(replicas) == verifiers == len(cores) and None not in cores and deployment.all_replicas_are_known()
    except (psutil.NoSuchProcess, OSError):
        return False


def violations(deployment: Deployment, calls: list[Call], faults: Faults) -> list[str]:
    """What should not have happened, in words."""
    found = []
    first_cut = min((fault.at for fault in faults.done if fault.cuts), default=float("inf"))
    last_error = faults.over_at + AFTERMATH_S
    for call in calls:
        said = f"{call.kind.name}, {len(call.prompt)} + {call.max_tokens} tokens"
        for attempt in call.attempts:
            found += [f"{said}: {problem}" for problem in _wrong_tokens(deployment, call, attempt)]
            error = attempt.error
            if error is None:
                continue
            if error.code is not grpc.StatusCode.UNAVAILABLE:
                found.append(f"{said}: ended with {error}")
            if not (first_cut <= attempt.ended and attempt.started <= last_error):
                found.append(f"{said}: cut although nothing that it ran on was lost: {error}")
        if not call.answered:
            found.append(f"{said}: not answered after {len(call.attempts)} attempts: {call.attempts[-1].error}")
        elif call.leaves_after is None and len(call.attempts[-1].tokens) != call.max_tokens:
            found.append(f"{said}: {len(call.attempts[-1].tokens)} tokens came")
    return found


def _wrong_tokens(deployment: Deployment, call: Call, attempt: Attempt) -> list[str]:
    if not attempt.tokens:
        return []
    if call.kind.choice is None:
        outside = deployment.reference.outside_top(call.prompt, attempt.tokens, TOP_K)
        return [f"tokens {outside} are none of the {TOP_K} likeliest"] if outside else []
    try:
        deployment.reference.check(call.prompt, attempt.tokens, label=call.kind.name, choice=call.kind.choice)
    except AssertionError as error:
        return [str(error)]
    return []


def summary(calls: list[Call], faults: list[Fault]) -> str:
    again = sum(len(call.attempts) - 1 for call in calls)
    errors = Counter(attempt.error.code.name for call in calls for attempt in call.attempts if attempt.error)
    struck = ", ".join(f"{name} {count}" for name, count in sorted(Counter(fault.name for fault in faults).items()))
    tokens = sum(len(attempt.tokens) for call in calls for attempt in call.attempts)
    return f"{len(calls)} calls, {tokens} tokens, {again} asked again ({dict(errors)}); faults: {struck}"
