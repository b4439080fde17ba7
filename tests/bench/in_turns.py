"""``python -m tests.bench.in_turns A B``: two servers, given by their gRPC addresses, asked the same in turns.

For what is too small to be seen between two runs: both stand all the time, one is asked, then the other, and of each
pair of turns the ratio is taken. Which of a pair is first changes from pair to pair. With ``--processes PID PID``, of
their `outrider serve`, processor time a token too, of all their processes: another program stretches it less.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from contextlib import suppress

import psutil

from outrider.deploy.bench.machine import machine, versions
from outrider.deploy.client.sync_client import OutriderClient

TOKENS = 64


def processor_s(server: psutil.Process) -> float:
    """Return the CPU seconds of a server so far, with all that it has started."""
    total = 0.0
    for process in [server, *server.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def turn(client: OutriderClient, number: int, streams: int, requests: int) -> float:
    """Seconds that `streams` callers with `requests` each take; the prompts are those of the turn's number."""

    def ask(stream: int) -> None:
        for request in range(requests):
            client.generate(
                f"Caller {stream} asks for the {number}th time about item {request}: count to twenty.",
                max_tokens=TOKENS, temperature=0.0, ignore_eos=True,
            )  # fmt: skip

    callers = [threading.Thread(target=ask, args=(stream,)) for stream in range(streams)]
    begun = time.perf_counter()
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    return time.perf_counter() - begun


def told(what: str, pairs: list[tuple[float, float]]) -> str:
    """Return the ratio of both sides' seconds over pairs of turns, in words."""
    ratios = [first / second for first, second in pairs]
    mean = statistics.fmean(ratios)
    error = 1.96 * statistics.stdev(ratios) / len(ratios) ** 0.5
    return (
        f"{what}, first against second: {mean:.3f} (95% {mean - error:.3f} to {mean + error:.3f}; median "
        f"{statistics.median(ratios):.3f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("addresses", nargs=2, metavar="ADDRESS")
    parser.add_argument("--processes", nargs=2, type=int, metavar="PID", default=())
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--requests", type=int, default=2, help="of each stream in a turn")
    asked = parser.parse_args()
    print(machine(()), versions(), flush=True)
    clients = [OutriderClient(address) for address in asked.addresses]
    servers = [psutil.Process(pid) for pid in asked.processes]
    for client in clients:
        turn(client, -1, asked.streams, 2)
    walls: list[tuple[float, float]] = []
    processors: list[tuple[float, float]] = []
    tokens = asked.streams * asked.requests * TOKENS
    for pair in range(asked.pairs):
        wall, processor = [0.0, 0.0], [0.0, 0.0]
        for which in (0, 1) if pair % 2 == 0 else (1, 0):
            before = processor_s(servers[which]) if servers else 0.0
            wall[which] = turn(clients[which], pair, asked.streams, asked.requests)
            processor[which] = processor_s(servers[which]) - before if servers else 0.0
        walls.append((wall[0], wall[1]))
        processors.append((processor[0], processor[1]))
        line = f"{pair + 1}/{asked.pairs}: {tokens / wall[0]:.1f} and {tokens / wall[1]:.1f} tok/s"
        if servers:
            line += f", {processor[0] / tokens * 1e3:.2f} and {processor[1] / tokens * 1e3:.2f} ms of processor a token"
        print(line, flush=True)
    print(told("time", walls))
    if servers:
        print(told("processor time", processors))


if __name__ == "__main__":
    main()
