"""What callers may send that is refused, in seconds of the server's time. Pure.

A call that ends by its caller's own fault has cost something all the same: it was received, decoded, looked at, maybe
tried out. So its caller is charged for it, out of a bucket that is refilled evenly, and who has overdrawn is refused at
once, before a message or a body is read. What is refused for that costs the caller nothing, and what is answered never
does: one bug in a client slows it down and does not lock it out.

Whoever shows a key pays with the key. What comes without one is charged to its address, and hurts nobody there who has
a key; and what anybody may ask without a key, health above all, pays for itself alone: a neighbour's bad requests do
not make a probe fail.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal, NamedTuple

import grpc

from outrider.actors.serving.access.limits import Bucket

BASE_S = 0.002
"""Of a call in a proxy, whatever it was."""

MIB_S = 0.01
"""Of each MiB that was received of it: to read, to copy, to count and to decode."""

BROKEN_OFF_S = 0.02
"""Of a gRPC call that was over before its message was there: left by its caller, or ended by gRPC, for a message too
large that it has received, maybe decompressed. Which of them is not told, nor how many bytes it was."""

MOST_HANDLER_S = 2.0
"""Of the time until it was refused behind the proxy. What takes longer has waited for others."""

MOST_PAYERS = 4096
"""Whose debts are remembered. Beyond this those who owe least are forgotten."""

Kind = Literal["key", "address", "open"]

FAULTS = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.NOT_FOUND,
    }
)
"""Codes that are the caller's own doing. A full queue, a limit of a key, an id in use or a passed deadline is not."""

_CODES = {code.value[0]: code for code in grpc.StatusCode}
_NO_FAULTS = (408, 409, 429, 499)
"""Of HTTP's 4xx: as above."""


class Payer(NamedTuple):
    """Whom a call is charged to. name: of a key, or an address (of IPv6 a network of 64 bits). ``open``: an address,
    for what takes no key."""

    kind: Kind
    name: str


class Bill:
    """What one call has cost so far. payer None: it is not charged."""

    def __init__(self, *, is_whole: bool, clock: Callable[[], float] = time.monotonic) -> None:
        """is_whole: nothing more of the request is to come than its header."""
        self.payer: Payer | None = None
        self.is_whole = is_whole
        self._clock = clock
        self._num_bytes = 0
        self._broken_off = False
        self._handed_on_s: float | None = None
        self._handler_s = 0.0

    def received(self, num_bytes: int, *, is_whole: bool) -> None:
        """So much more of it, in bytes, decompressed."""
        self._num_bytes += num_bytes
        self.is_whole = self.is_whole or is_whole

    def broken_off(self) -> None:
        self._broken_off = True

    def handed_on(self) -> None:
        """The request leaves the proxy. What waited for its turn before that has cost nothing."""
        self._handed_on_s = self._clock()

    def answered(self) -> None:
        """It has come back."""
        if self._handed_on_s is not None:
            self._handler_s = self._clock() - self._handed_on_s

    def cost_s(self) -> float:
        base_s = BROKEN_OFF_S if self._broken_off else BASE_S
        return base_s + MIB_S * self._num_bytes / (1 << 20) + min(self._handler_s, MOST_HANDLER_S)

    def is_fault_over_grpc(self, code: grpc.StatusCode | int | None) -> bool:
        """Whether the call is to be paid for, as it ended: refused for what it was, or never sent in full."""
        return not self.is_whole or (_CODES.get(code) if isinstance(code, int) else code) in FAULTS

    def is_fault_over_http(self, status: int | None) -> bool:
        """status None: it has left before there was any."""
        return not self.is_whole or (status is not None and 400 <= status < 500 and status not in _NO_FAULTS)


BILL: ContextVar[Bill | None] = ContextVar("what the call that this task answers has cost", default=None)


@dataclass(frozen=True)
class Weighed:
    """A deserializer that tells the call's bill how large its message is, and that it is there."""

    deserialize: Callable[[bytes], object]

    def __call__(self, data: bytes) -> object:
        if (bill := BILL.get()) is not None:
            bill.received(len(data), is_whole=True)
        return self.deserialize(data)


def hand_on() -> None:
    """The call that this task answers leaves the proxy."""
    if (bill := BILL.get()) is not None:
        bill.handed_on()


class Budget:
    """Of all callers of one proxy. Not thread-safe.

    A bucket holds a minute's worth, and nobody owes more than another: after a minute at most a caller is let in again.
    """

    def __init__(self, seconds_per_minute: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._a_minute, self._clock = seconds_per_minute, clock
        self._buckets: dict[Payer, Bucket] = {}
        """Of those who have been charged and not made up for it yet."""

    def __len__(self) -> int:
        return len(self._buckets)

    def wait_s(self, payer: Payer) -> float:
        """Until the payer's next call is let in; 0: it is now."""
        bucket = self._buckets.get(payer)
        if bucket is None:
            return 0.0
        bucket.refill(self._a_minute, self._clock())
        if bucket.level >= self._a_minute:
            del self._buckets[payer]
        return bucket.seconds_until(0.0)

    def charge(self, payer: Payer, cost_s: float) -> None:
        bucket = self._buckets.get(payer)
        if bucket is None:
            if len(self._buckets) >= MOST_PAYERS:
                self._forget()
            bucket = self._buckets[payer] = Bucket.full(self._a_minute, self._clock())
        bucket.refill(self._a_minute, self._clock())
        bucket.level = max(bucket.level - cost_s, -self._a_minute)

    def _forget(self) -> None:
        """One in two: seldom, then."""
        for bucket in self._buckets.values():
            bucket.refill(self._a_minute, self._clock())
        by_debt = sorted(self._buckets.items(), key=lambda item: item[1].level)
        self._buckets = dict(by_debt[: MOST_PAYERS // 2])
