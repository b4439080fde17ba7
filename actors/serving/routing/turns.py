"""Whose request is the next to get a place at a replica, where callers are told apart. Pure.

Each caller's requests are served in order of arrival, and callers by what they have had: start-time fair queueing
(Goyal, Vin, Cheng, IEEE/ACM Transactions on Networking 5(5), 1997). A request's turn is a virtual time, counted in
tokens: that of its caller's clock, which each request that is served moves on by its size, or, if that is later, that
of whoever was served last. It needs no rate to go by, as one does that compares with the time of day
(outrider.actors.round.scheduling), so that it holds however long the wait is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container

Turn = tuple[int, int]
"""Virtual time, and how many had come before: the lower, the sooner."""

_MOST_CLOCKS = 1024
"""Before those are looked for that tell nothing any more."""


class Turns:
    """Of the requests that wait in one process. Not thread-safe.

    - All of one caller: in order of arrival.
    - A caller that comes with nothing before waits for one request of each other caller at most.
    - Between two that have some waiting all the while, what they get differs by the largest request of each at most.
    - A request that leaves without being served costs its caller nothing.
    """

    def __init__(self) -> None:
        self._lines: defaultdict[int, dict[int, tuple[int, int]]] = defaultdict(dict)
        """By caller: what waits, in order of arrival, each with its number and tokens."""

        self._callers: dict[int, int] = {}
        """By request."""

        self._clocks: dict[int, int] = {}
        """By caller; one that is behind the virtual time tells nothing."""

        self._now = 0
        self._arrivals = 0

    def __contains__(self, request: int) -> bool:
        return request in self._callers

    def join(self, request: int, caller: int, tokens: int) -> None:
        """request: what it is called here, until it is served or leaves. caller: 0 where nobody knows."""
        self._arrivals += 1
        self._callers[request] = caller
        self._lines[caller][request] = self._arrivals, max(1, tokens)

    def leave(self, request: int) -> None:
        """It waits no longer. Nothing happens if it has been served."""
        if (caller := self._callers.pop(request, None)) is not None:
            self._drop(caller, request)

    def serve(self, request: int) -> None:
        """It gets its place. Nothing happens if it has been served, or has left."""
        if (caller := self._callers.pop(request, None)) is None:
            return
        _, tokens = self._drop(caller, request)
        self._now = max(self._now, self._clocks.get(caller, 0))
        if len(self._clocks) >= _MOST_CLOCKS:
            self._clocks = {each: clock for each, clock in self._clocks.items() if clock > self._now}
        self._clocks[caller] = self._now + tokens

    def turn(self, request: int) -> Turn:
        """Of one that waits, were all of its caller's before it served."""
        caller = self._callers[request]
        time = self._beginning(caller)
        for each, (number, tokens) in self._lines[caller].items():
            if each == request:
                return time, number
            time += tokens
        raise AssertionError

    def first(self, among: Container[int]) -> int | None:
        """Whose turn comes first; None where none of them waits."""
        best: tuple[Turn, int] | None = None
        for caller, line in self._lines.items():
            time = self._beginning(caller)
            for request, (number, tokens) in line.items():
                if request in among:
                    best = ((time, number), request) if best is None else min(best, ((time, number), request))
                    break
                time += tokens
        return None if best is None else best[1]

    def _beginning(self, caller: int) -> int:
        return max(self._now, self._clocks.get(caller, 0))

    def _drop(self, caller: int, request: int) -> tuple[int, int]:
        line = self._lines[caller]
        dropped = line.pop(request)
        if not line:
            del self._lines[caller]
        return dropped
