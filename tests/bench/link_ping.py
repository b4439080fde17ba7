"""Round trips over a link's wires, by turns: `python -m tests.bench.link_ping [TURNS]`.

Two processes, a link a wire, all of them open at once. A small frame goes by `Link.ping`; one of 16 KB is posted, and
posted back by the peer's receive thread. *whole frames* is Gloo as it was: each frame as long as the capacity. Of each
the median over all turns, what a tenth stays below, and this end's processor time a trip, in microseconds; and each as
a share of the first wire's of the same run. On a machine that does much else the last one says most.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
import queue
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from outrider.cluster.link import Link, Transport, host_link, join_link
from outrider.cluster.link.frame import HEADER_WORDS

CAPACITY_WORDS = 4096
"""16 KB: the least that a link has."""

EACH, TURNS = 100, 40
WIRES = {"gloo, whole frames": "gloo", "gloo": "gloo", "local": "local"}
SECRET = bytes(32)


class WholeFrames:
    """A transport that sends each frame as long as the capacity."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._whole = np.zeros(CAPACITY_WORDS, np.int32)

    def start_send(self, buffer: np.ndarray) -> Callable[[], None] | None:
        self._whole[: len(buffer)] = buffer
        return self._transport.start_send(self._whole)

    def recv(self, buffer: np.ndarray, timeout_s: float) -> None:
        self._transport.recv(buffer, timeout_s)

    def abort(self) -> None:
        self._transport.abort()


def linked(wire: str, transport: Any, on_receive: Callable[[Any], None] | None = None) -> Link[np.ndarray]:
    if wire == "gloo, whole frames":
        transport = WholeFrames(transport)
    link = Link(
        transport, epoch=1, capacity_words=CAPACITY_WORDS, link_deadline_s=120.0, decode=np.copy, name=wire,
        on_receive=on_receive,
    )  # fmt: skip
    link.start()
    return link


def echo(invitations: Connection) -> None:
    """The other process."""
    logging.disable(logging.WARNING)  # of links that end
    links: list[Link[np.ndarray]] = []
    while (told := invitations.recv()) is not None:
        wire, invitation = told
        transport = join_link(invitation, SECRET, 60.0)
        links.append(linked(wire, transport, lambda received: links[received.messages[0]].post([received.messages])))
        invitations.send(wire)
    for link in links:
        link.abort("done")
        link.join()


def main() -> None:
    turns = int(sys.argv[1]) if len(sys.argv) > 1 else TURNS
    here, there = multiprocessing.get_context("spawn").Pipe()
    peer = multiprocessing.get_context("spawn").Process(target=echo, args=(there,), daemon=True)
    peer.start()
    links: dict[str, Link[np.ndarray]] = {}
    back: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for wire, backend in WIRES.items():
        invitation, complete = host_link(
            host="127.0.0.1", epoch=1, backend=backend, capacity_words=CAPACITY_WORDS, round_deadline_ms=1e3,
            link_deadline_ms=120e3, vocab_size=1000, num_speculative_tokens=4, verifier_id=wire, secret=SECRET,
            sealed=False,
        )  # fmt: skip
        here.send((wire, invitation))
        links[wire] = linked(wire, complete(60.0), back.put)
        here.recv()
    took: dict[tuple[str, str], list[float]] = {}
    worked: dict[tuple[str, str], list[float]] = {}
    for _ in range(turns):
        for index, (wire, link) in enumerate(links.items()):
            payload = np.full(CAPACITY_WORDS - HEADER_WORDS, index, np.int32)

            def whole(link: Link[np.ndarray] = link, payload: np.ndarray = payload) -> None:
                link.post([payload])
                back.get(timeout=60.0)

            for size, trip in (("ping", functools.partial(link.ping, 1)), ("16 KB", whole)):
                worked_ns = time.process_time_ns()
                for _ in range(EACH):
                    start_ns = time.perf_counter_ns()
                    trip()
                    took.setdefault((size, wire), []).append((time.perf_counter_ns() - start_ns) / 1e3)
                worked.setdefault((size, wire), []).append((time.process_time_ns() - worked_ns) / 1e3 / EACH)
    print(f"{'':27} {'median':>15} {'a tenth':>15} {'processor':>15}")
    for size in ("ping", "16 KB"):
        firsts = None
        for wire in links:
            times = took[size, wire]
            row = (
                statistics.median(times),
                statistics.quantiles(times, n=10)[0],
                statistics.median(worked[size, wire]),
            )
            firsts = firsts or row
            cells = "".join(f" {one:9.1f} {one / first:5.2f}" for one, first in zip(row, firsts, strict=True))
            print(f"{size:>6} {wire:20}{cells}")
    here.send(None)
    for link in links.values():
        link.abort("done")
        link.join()
    peer.join(10.0)


if __name__ == "__main__":
    main()
