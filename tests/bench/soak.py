"""``python -m tests.bench.soak --seconds 300``: legitimate load on a real server, alone and beside attackers by turns.

The server is `outrider serve` of a tiny target and a tiny drafter on this machine, with keys and TLS: Ray, Serve's
proxies, vLLM's engine. The load (`soak_load`) streams without a pause; every answer must be whole, and its tokens
those that the same prompt got alone. The attackers (`soak_attacks`) do what docs/security.md lists, in processes of
their own, at rates that are set and not as fast as they can: on one machine they take processor time from the server
that an attacker from elsewhere would not, so it is measured and printed.

Ends with status 1 when a goal is missed: throughput beside attackers >= 0.8 of that alone, no request lost, no answer
other than alone, memory of each process at most 64 MiB more at the end, and no more open files than at the start.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil

from outrider.actors.serving.access.keys import Key, as_entry, hash_of, new_secret
from outrider.cluster.placement import available_cores
from tests.bench.machine import machine
from tests.bench.soak_attacks import CREWS, Victim
from tests.bench.soak_load import (
    Client,
    Load,
    clients,
    differing,
    longest_gap_s,
    request_id,
    seconds_an_answer,
    tokens_between,
)
from tests.bench.soak_report import Phase, Sample, Soak, Turn, phases, report, told
from tests.certificates import Authority
from tests.outrider_serve import Served, outrider_serve
from tests.reference import Reference
from tests.serving import K, Models, build_models, engine
from tests.tiny_models import EOS

SETTLES_WITHIN_S = 100.0
"""In which what the attackers held is given back, once they have left: constraints are kept for a minute."""

ENVIRONMENT = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32"}
"""Of the server. oneDNN keeps a routine for each shape of a matrix product, 1,024 of them by default: some 100 MiB,
which fill up with every batch size that has not been there before and would hide what else grows."""

WARM_UP_S = 10.0
"""Of the load, all clients at once, before anything is measured; then again beside all attackers, for twice as long, so
that whatever is made or opened once, the first time that it is asked for, is there when the start is looked at."""

MOST_NAMES = 40
"""Request ids of each client that a stranger guesses."""

KINDS = {
    "ProxyActor": "proxy",
    "Ingress": "ingress replica",
    "Target": "target replica",
    "EngineCore": "engine core",
    "RankProc": "target rank 0",
    "Verifier": "target rank 0",
    "Drafter": "drafter",
    "ServeController": "controller",
}
"""Processes that are watched, by a part of their command lines: the first that fits."""


@dataclass
class Watched:
    """Processes by kind. All are to live as long as the server."""

    pids: dict[str, list[int]]
    root: psutil.Process

    @classmethod
    def of(cls, served: Served) -> Watched:
        found: dict[str, list[int]] = {}
        for process in served.tree():
            try:
                line = " ".join(process.cmdline()) or process.name()
            except psutil.NoSuchProcess:
                continue
            kind = next((kind for part, kind in KINDS.items() if part in line), None)
            if kind is not None:
                found.setdefault(kind, []).append(process.pid)
        missing = set(KINDS.values()) - found.keys()
        assert not missing, f"no process of these is there: {missing}"
        return cls(found, psutil.Process(served.process.pid))

    def sample(self) -> dict[str, Sample]:
        """Raises psutil.NoSuchProcess when one has died."""
        samples: dict[str, Sample] = {}
        for kind, pids in self.pids.items():
            processes = [psutil.Process(pid) for pid in pids]
            opened = sum(map(_opened, pids), Counter[str]())
            samples[kind] = Sample(sum(process.memory_info().rss for process in processes), opened, len(processes))
        return samples

    def cpu_s(self) -> dict[str, float]:
        """So far, by kind, what each has started and seen end included; the rest of the server as ``others``."""
        found = dict.fromkeys([*self.pids, "others"], 0.0)
        kinds = {pid: kind for kind, pids in self.pids.items() for pid in pids}
        for process in (self.root, *self.root.children(recursive=True)):
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            kind = kinds.get(process.pid, "others")
            found[kind] += times.user + times.system + times.children_user + times.children_system
        return found


def _opened(pid: int) -> Counter[str]:
    """Its open files, by what they are without their numbers. Raises psutil.NoSuchProcess."""
    found: Counter[str] = Counter()
    try:
        for each in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                found[re.sub(r"\d+", "#", os.readlink(each))] += 1
    except FileNotFoundError:
        raise psutil.NoSuchProcess(pid) from None
    return found


class Attackers:
    """The crews, each in its process."""

    def __init__(self, processes: dict[str, asyncio.subprocess.Process]) -> None:
        self._processes = processes
        self.endings: dict[str, Counter[str]] = {attack.name: Counter() for crew in CREWS.values() for attack in crew}

    @classmethod
    async def start(cls, victim: Victim) -> Attackers:
        processes = {}
        for crew in CREWS:
            processes[crew] = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "tests.bench.soak_attacks", crew, stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[2],
            )  # fmt: skip
        self = cls(processes)
        self._tell(victim.to_json())
        for process in processes.values():
            assert process.stdout is not None
            assert await process.stdout.readline() == b"ready\n", "an attacker did not start"
        return self

    def go(self, row: str = "") -> None:
        self._tell(f"go {row}")

    async def stop(self) -> None:
        self._tell("stop")
        for process in self._processes.values():
            assert process.stdout is not None
            for name, endings in json.loads(await process.stdout.readline()).items():
                self.endings[name].update(endings)

    def forget(self) -> None:
        """What came of what has been done so far."""
        for endings in self.endings.values():
            endings.clear()

    async def leave(self) -> None:
        for process in self._processes.values():
            assert process.stdin is not None
            process.stdin.close()
            await process.wait()

    def cpu_s(self) -> float:
        times = [psutil.Process(process.pid).cpu_times() for process in self._processes.values()]
        return sum(each.user + each.system for each in times)

    def _tell(self, line: str) -> None:
        for process in self._processes.values():
            assert process.stdin is not None
            process.stdin.write(line.encode() + b"\n")


def judge_answers(load: Sequence[Client], target: Path) -> tuple[list[str], int]:
    """Answers that are wrong, and how many differ by a tie alone. A constraint's answer is held to be the same: which
    tokens it left to choose from is not known here."""
    reference, wrong, ties = Reference(target), [], 0
    for client in load:
        for alone, answer in differing(client):
            try:
                assert client.kind != "json", f"{client.name}: {answer.tokens} instead of {alone.tokens}"
                prompt = list(answer.prompt.encode())
                reference.check(prompt, answer.tokens, alone.tokens, label=client.name)
                ties += 1
            except AssertionError as error:
                wrong.append(str(error)[:300])
    return wrong, ties


def write_keys(path: Path) -> dict[str, str]:
    """The file, and the secrets by name."""
    status_too = ("generate", "status")
    keys = {
        "friend": {"scopes": status_too},
        "open": {"scopes": status_too},
        # What is valid work takes what work takes: who may send how much of it is for limits to say.
        "glutton": {"scopes": ("generate",), "concurrent_requests": 1, "tokens_per_minute": 1000},
        "old": {"scopes": ("generate",), "expires": datetime.now(UTC) - timedelta(hours=1)},
        "ops": {"scopes": ("status",)},
    }
    found = {name: new_secret() for name in keys}
    path.touch(mode=0o600)
    path.write_text(
        "".join(as_entry(Key(name=name, hash=hash_of(found[name].encode()), **more)) for name, more in keys.items())
    )
    return found


def configuration(models: Models, directory: Path, authority: Authority) -> dict[str, dict[str, object]]:
    """Sections. The drafter drafts in every round: what adapts to what pays would make phases differ by itself."""
    certificate, key = authority.sign().write(directory, "server")
    cores = available_cores()
    split = len(cores) > 1
    return {
        "target": {"cores": [[cores[0]]] if split else None},
        "drafter": {"method": "draft_model", **engine(models.drafter), "cores": [[cores[1]]] if split else None},
        "speculation": {"num_speculative_tokens": K, "adaptive": False},
        "serving": {
            "keys_file": str(directory / "keys.yaml"),
            "structured_output": "json",
            "ssl_certfile": str(certificate),
            "ssl_keyfile": str(key),
        },
        # Times, so that what they end is seen to end within a phase. Numbers, as an operator fits them to two cores and
        # an engine that bears some ten answers at once.
        "limits": {
            "receive_timeout_s": 8,
            "unread_timeout_s": 4,
            "greatest_max_tokens": 256,
            "max_sequences": 32,
            "max_control_calls_per_s": 5,
        },
    }


async def run_turns(
    load: Load, watched: Watched, attackers: Attackers, planned: Sequence[Phase]
) -> tuple[list[Turn], list[dict[str, Sample]]]:
    """The phases, and samples after each minute."""
    minutes: list[dict[str, Sample]] = []
    began = time.monotonic()
    sampling = asyncio.create_task(_each_minute(watched, minutes, began))
    turns = []
    for phase in planned:
        turn = Turn(phase, time.monotonic())
        before = _cpu_s(watched, attackers)
        if phase.beside:
            attackers.go(phase.row)
        await asyncio.sleep(began + phase.end_s - time.monotonic())
        if phase.beside:
            await attackers.stop()
        turn.end_s = time.monotonic()
        turn.cpu_s = {who: used - before[who] for who, used in _cpu_s(watched, attackers).items()}
        turn.tokens = tokens_between(load.clients, turn.start_s, turn.end_s)
        turn.longest_gap_s = longest_gap_s(load.clients, turn.start_s, turn.end_s)
        turn.seconds_an_answer = seconds_an_answer(load.clients, turn.start_s, turn.end_s)
        errors = sum(len(client.errors) for client in load.clients)
        say(f"{turn.end_s - began:5.0f} s  {turn}; errors so far: {errors}")
        turns.append(turn)
    sampling.cancel()
    return turns, minutes


def _cpu_s(watched: Watched, attackers: Attackers) -> dict[str, float]:
    return {**watched.cpu_s(), "attackers": attackers.cpu_s(), "clients": time.process_time()}


async def _each_minute(watched: Watched, minutes: list[dict[str, Sample]], began: float) -> None:
    while True:
        await asyncio.sleep(began + 60 * (len(minutes) + 1) - time.monotonic())
        minutes.append(watched.sample())
        say("        " + told(minutes[-1]))


async def settled(watched: Watched, start: dict[str, Sample]) -> dict[str, Sample]:
    """The samples once no kind has more files open than at the start, or SETTLES_WITHIN_S later."""
    give_up = time.monotonic() + SETTLES_WITHIN_S
    while True:
        now = watched.sample()
        more = [kind for kind in now if now[kind].files > start[kind].files]
        if not more or time.monotonic() > give_up:
            return now
        await asyncio.sleep(1)


def say(text: str) -> None:
    print(text, flush=True)


async def soak(
    served: Served, victim: Victim, friend: str, planned: Sequence[Phase], target: Path, load: list[Client], busy: float
) -> Soak:
    async with Load(served.grpc, served.http, victim.authority, friend, load) as running:
        await running.alone()
        for client in load:
            for answer in client.alone:
                assert answer.ended, f"{client.name} alone: {answer}"
        written = bytes(token for token in load[-1].alone[0].tokens if token != EOS)
        say(f"{len(load)} clients have been answered alone; {load[-1].name}: {written.decode()}")
        attackers = await Attackers.start(victim)
        running.start()
        await asyncio.sleep(WARM_UP_S)
        await running.stop()
        await running.ask_beside()
        running.pace(busy)
        watched = Watched.of(served)
        fresh = watched.sample()
        say(f"fresh   {told(fresh)}")
        running.start()
        attackers.go()
        await asyncio.sleep(2 * WARM_UP_S)
        await attackers.stop()
        attackers.forget()
        await running.stop()
        start = await settled(watched, fresh)
        say(f"start   {told(start)}")
        running.start()
        turns, minutes = await run_turns(running, watched, attackers, planned)
        await attackers.leave()
        await running.stop()
        end = await settled(watched, start)
        say(f"end     {told(end)}")
    wrong, ties = judge_answers(load, target)
    result = Soak(turns, load, start, minutes, end, wrong, attackers.endings, ties)
    for line in report(result):
        say(line)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0, help="of load, alone and beside attackers together")
    parser.add_argument("--one-by-one", action="store_true", help="a phase for each row of attacks, to see which costs")
    parser.add_argument("--rows", nargs="+", default=(), help="a phase for each of these, rows joined by '; '")
    parser.add_argument(
        "--busy", type=float, default=1.0,
        help="share of its time that each client waits for an answer when nobody attacks: 1, the server is asked for "
        "all it can do, and what takes a tenth of the machine takes a tenth of the speed; below, it has some to spare",
    )  # fmt: skip
    args = parser.parse_args()
    if not 0 < args.busy <= 1:
        parser.error("--busy: a share above 0, 1 at most")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))  # and the server with it
    say(f"{machine()}; clients busy {args.busy:g}")
    rows = list(dict.fromkeys(attack.row for crew in CREWS.values() for attack in crew))
    if unknown := {row for joined in args.rows for row in joined.split("; ")} - {*rows, ""}:
        parser.error(f"--rows: no attacks are called {', '.join(sorted(unknown))}; there are {'; '.join(rows)}")
    planned = phases(args.seconds, rows if args.one_by_one else args.rows)
    load = clients()
    names = [request_id(client.name, number) for client in load for number in range(MOST_NAMES)]
    with tempfile.TemporaryDirectory(prefix="outrider-soak-") as temporary:
        directory = Path(temporary)
        authority, models = Authority(), build_models(directory / "models")
        keys = write_keys(directory / "keys.yaml")
        changes = configuration(models, directory, authority)
        with outrider_serve(models, directory / "serve", ENVIRONMENT, **changes) as served:
            theirs = {name: secret for name, secret in keys.items() if name != "friend"}
            victim = Victim(served.grpc, served.http, authority.certificate.decode(), theirs, names)
            result = asyncio.run(soak(served, victim, keys["friend"], planned, models.target, load, args.busy))
    sys.exit(0 if all(goal.is_met for goal in result.goals()) else 1)


if __name__ == "__main__":
    main()
