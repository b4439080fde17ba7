"""Round trips over a link's host wires, in turns: `python -m tests.bench.link_ping [TURNS]`.

Two processes, and a link for each wire, all of them open at once. A frame is posted, and posted back by the peer's
receive thread. For each size and wire it prints the median and the 99th percentile of all turns, and this end's
processor time for a trip, in microseconds.
"""

from __future__ import annotations

import logging
import multiprocessing
import queue
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from outrider.cluster.link import Link, Wire, host_link, join_link

SIZES = (12, 2_700, 16_384)
EACH, TURNS = 50, 60
WIRES = ("ipc", "tcp")
TIMEOUT_S = 60.0


def linked(name: str, wire: Wire, on_receive: Callable[[Any], None]) -> Link[bytes]:
    link = Link(wire, epoch=1, link_deadline_s=120.0, decode=bytes, name=name, on_receive=on_receive)
    link.start()
    return link


def echo(invitations: Connection) -> None:
    """Runs in the other process."""
    logging.disable(logging.WARNING)  # of links that end
    links: dict[str, Link[bytes]] = {}
    while (told := invitations.recv()) is not None:
        name, invitation = told
        wire = join_link(invitation, TIMEOUT_S)
        links[name] = linked(name, wire, lambda received, name=name: links[name].post([received.messages]))
        invitations.send(name)
    for link in links.values():
        link.abort("done")
        link.join()


def main() -> None:
    turns = int(sys.argv[1]) if len(sys.argv) > 1 else TURNS
    processes = multiprocessing.get_context("spawn")
    here, there = processes.Pipe()
    peer = processes.Process(target=echo, args=(there,), daemon=True)
    peer.start()
    links: dict[str, Link[bytes]] = {}
    back: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for name in WIRES:
        invitation, complete = host_link(
            host="127.0.0.1", epoch=1, backend="auto", round_deadline_ms=1e3, link_deadline_ms=120e3, vocab_size=1000,
            num_speculative_tokens=4, verifier_id=name,
        )  # fmt: skip
        here.send((name, invitation if name == "ipc" else replace(invitation, local_addresses=None)))
        links[name] = linked(name, complete(TIMEOUT_S), back.put)
        here.recv()
    took: dict[tuple[int, str], list[float]] = {}
    worked: dict[tuple[int, str], list[float]] = {}
    for _ in range(turns):
        for size in SIZES:
            for name, link in links.items():
                worked_ns = time.process_time_ns()
                for _ in range(EACH):
                    start_ns = time.perf_counter_ns()
                    link.post([bytes(size)])
                    back.get(timeout=TIMEOUT_S)
                    took.setdefault((size, name), []).append((time.perf_counter_ns() - start_ns) / 1e3)
                worked.setdefault((size, name), []).append((time.process_time_ns() - worked_ns) / 1e3 / EACH)
    print(f"{'bytes':>7} {'wire':5} {'median':>9} {'p99':>9} {'processor':>9}")
    for (size, name), times in took.items():
        p99 = statistics.quantiles(times, n=100)[-1]
        work = statistics.median(worked[size, name])
        print(f"{size:7} {name:5} {statistics.median(times):9.1f} {p99:9.1f} {work:9.1f}")
    here.send(None)
    for link in links.values():
        link.abort("done")
        link.join()
    peer.join(10.0)


if __name__ == "__main__":
    main()
