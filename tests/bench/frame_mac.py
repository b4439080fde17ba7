"""What sealing a link's frames costs: `python tests/bench/frame_mac.py [ROUND_MS]`.

A round's frames, a commit and an answer a request, written, sealed and checked again on one core, by turns with and
without the MAC. Times are processor time, the least of many turns, in microseconds a round, both ends together; the
share is of a round of ROUND_MS milliseconds, 25 unless given. `access_cost` has this beside what keys and TLS cost.
"""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from outrider.cluster.link.authentication import SealedTransport
from outrider.cluster.link.codec import frame_capacity_words, pack
from outrider.cluster.link.frame import FrameKind, decode, encode
from outrider.cluster.link.messages import Commit, Message, Proposals, SparseQ

K, TOP_N = 4, 64
ROUNDS, TURNS = 20, 400


class Wire:
    """Hands over what was sent last."""

    def __init__(self) -> None:
        self.sent = np.empty(0, dtype=np.int32)

    def start_send(self, buffer: np.ndarray) -> Callable[[], None]:
        self.sent = buffer
        return lambda: None

    def recv(self, buffer: np.ndarray, timeout_s: float) -> None:
        buffer[:] = self.sent

    def abort(self) -> None: ...


def round_us(payloads: list[np.ndarray], capacity: int, sealed: bool) -> float:
    near = far = Wire()
    if sealed:
        keys = {"send_key": bytes(32), "receive_key": bytes(32)}
        near, far = SealedTransport(near, **keys), SealedTransport(far, **keys)  # type: ignore[assignment]
    out, into = np.zeros(capacity, np.int32), np.zeros(capacity, np.int32)
    sequence = 0
    started = time.process_time()
    for _ in range(ROUNDS):
        for payload in payloads:
            encode(out, epoch=1, sequence=sequence, kind=FrameKind.DATA, payload=payload)
            near.start_send(out)
            far.recv(into, 1.0)
            decode(into, 1, sequence)
            sequence += 1
    return (time.process_time() - started) / ROUNDS * 1e6


def messages(batch: int, top_n: int) -> tuple[list[Message], list[Message]]:
    q = None
    if top_n:
        q = SparseQ(np.tile(np.arange(top_n, dtype=np.int32), (K, 1)), np.full((K, top_n), 1 / top_n, np.float32))
    commits: list[Message] = [Commit(one, 100, [1, 2, 3], K, K) for one in range(batch)]
    return commits, [Proposals(one, 103, [1] * K, q=q) for one in range(batch)]


@dataclass(frozen=True)
class Cost:
    """Of one round. plain_us, sealed_us: processor time, both ends together."""

    num_bytes: int
    plain_us: float
    sealed_us: float

    @property
    def added_us(self) -> float:
        return self.sealed_us - self.plain_us


def cost(batch: int, top_n: int, turns: int = TURNS) -> Cost:
    """Of so many requests, whose drafts come with q of top_n tokens a position."""
    capacity = frame_capacity_words(batch, K, TOP_N)
    payloads = [payload for part in messages(batch, top_n) for payload in pack(part, capacity)]
    taken = [(round_us(payloads, capacity, False), round_us(payloads, capacity, True)) for _ in range(turns)]
    plain, sealed = (min(turn[side] for turn in taken) for side in (0, 1))
    return Cost(sum(4 * len(payload) for payload in payloads), plain, sealed)


def main() -> None:
    round_ms = float(sys.argv[1]) if len(sys.argv) > 1 else 25.0
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, K = {K}")
    print(f"{'batch':>5} {'q':>4} {'bytes':>7} {'plain':>8} {'sealed':>8} {'ratio':>6}  share of {round_ms:g} ms")
    for batch in (1, 8, 32):
        for top_n in (0, TOP_N):
            one = cost(batch, top_n)
            ratio, share = one.sealed_us / one.plain_us, one.added_us / round_ms / 10
            print(
                f"{batch:5} {top_n:4} {one.num_bytes:7} {one.plain_us:8.1f} {one.sealed_us:8.1f} {ratio:6.2f}"
                f"  {share:.2f} %"
            )


if __name__ == "__main__":
    main()
