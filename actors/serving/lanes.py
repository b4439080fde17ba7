"""Turns for calls beside generations: so many at once, so many a second, callers by turns (Lane).

Who asks often waits behind itself. What waits has a bound, one caller a fourth of it, and when there is no room left
the newest call of whoever has most waiting makes room for the newcomer: no caller keeps the others out by asking.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

MOST_WAITING = 1024
"""Small calls that wait for a turn in one lane."""

CALL_BYTES = 1 << 16
"""A call that waits counts for so much at least, whatever it brings."""

SHARE_OF_ONE = 4
"""One caller's calls have this part of the room, one over it, unless nothing else of it waits."""


class LaneFull(Exception):
    """No turn came in time. message: one sentence for the caller."""


@dataclass(eq=False)
class _Turn:
    coming: asyncio.Future[None]
    num_bytes: int


class Lane:
    """Turns for one kind of call. Callers who wait have theirs one after the other, each caller in order of arrival:
    however often one asks, the next one's call is not behind all of it."""

    def __init__(
        self,
        name: str,
        places: int,
        *,
        per_s: float | None = None,
        patience_s: float,
        most_of_one: int | None = None,
        most_waiting_bytes: int = MOST_WAITING * CALL_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """name: what the calls do, for the sentence. per_s: turns a second, of which one second's may be taken at
        once; None: as many as there are places. patience_s: after which a call that waits is refused; 0: at once.
        most_of_one: places that one caller may have; None: any."""
        self._name, self._free, self._per_s, self._patience_s = name, places, per_s, patience_s
        self._most_of_one = most_of_one
        self._most_waiting_bytes = most_waiting_bytes
        self._clock = clock
        self._credit = self._most_credit = max(1.0, per_s or 0.0)
        self._credited_s = clock()
        self._held: Counter[str] = Counter()
        """Places, by caller."""

        self._waiting: OrderedDict[str, deque[_Turn]] = OrderedDict()
        self._waiting_bytes: Counter[str] = Counter()
        self._wakes: asyncio.TimerHandle | None = None

    async def take(self, caller: str, num_bytes: int = 0) -> None:
        """A turn; `leave` has to follow. caller: the peer it calls from. num_bytes: what is kept of the call while it
        waits. Raises LaneFull."""
        if self._most_of_one is not None and self._held[caller] >= self._most_of_one:
            raise LaneFull(f"too many calls {self._name} from this address at once; end some")
        if not self._waiting and self._may_go(caller):
            return
        if not self._patience_s:
            raise LaneFull(f"too many calls {self._name} at once; ask less often")
        turn = _Turn(asyncio.get_running_loop().create_future(), max(num_bytes, CALL_BYTES))
        self._make_room(caller, turn.num_bytes)
        self._waiting.setdefault(caller, deque()).append(turn)
        self._waiting_bytes[caller] += turn.num_bytes
        self._grant()
        try:
            async with asyncio.timeout(self._patience_s):
                await turn.coming
        except BaseException as error:
            if turn.coming.done() and not turn.coming.cancelled() and turn.coming.exception() is None:
                self.leave(caller)  # it came, to somebody who has left
            elif turn in self._waiting.get(caller, ()):
                self._remove(caller, turn)
                self._grant()
            if isinstance(error, TimeoutError):
                raise LaneFull(
                    f"no turn for calls {self._name} within {self._patience_s:g} s; ask less often"
                ) from None
            raise

    def leave(self, caller: str) -> None:
        """caller: as it took the turn."""
        self._free += 1
        _less(self._held, caller, 1)
        self._grant()

    def _make_room(self, caller: str, num_bytes: int) -> None:
        """For a call of so many bytes. Raises LaneFull where there is none that it should have."""
        its_own = self._waiting_bytes[caller]
        most = self._most_waiting_bytes
        if its_own and its_own + num_bytes > most // SHARE_OF_ONE:
            raise LaneFull(f"too many calls {self._name} from this address wait for a turn; ask less often")
        while self._waiting and self._waiting_bytes.total() + num_bytes > most:
            greediest, taken = self._waiting_bytes.most_common(1)[0]
            if taken <= its_own + num_bytes:
                raise LaneFull(f"too many calls {self._name} at once; ask less often")
            turn = self._waiting[greediest][-1]
            self._remove(greediest, turn)
            if not turn.coming.done():
                sentence = f"too many calls {self._name} from this address while others ask; ask less often"
                turn.coming.set_exception(LaneFull(sentence))

    def _remove(self, caller: str, turn: _Turn) -> None:
        queue = self._waiting[caller]
        queue.remove(turn)
        _less(self._waiting_bytes, caller, turn.num_bytes)
        if not queue:
            del self._waiting[caller]

    def _may_go(self, caller: str) -> bool:
        """Takes a place, and a turn, where there are some."""
        if not self._free:
            return False
        if self._per_s is not None:
            now = self._clock()
            self._credit = min(self._most_credit, self._credit + (now - self._credited_s) * self._per_s)
            self._credited_s = now
            if self._credit < 1:
                return False
            self._credit -= 1
        self._free -= 1
        self._held[caller] += 1
        return True

    def _grant(self) -> None:
        while self._waiting:
            caller, queue = next(iter(self._waiting.items()))
            turn = queue[0]
            gone = turn.coming.done()  # it gave up, and has not been removed yet
            if not gone and not self._may_go(caller):
                break
            self._remove(caller, turn)
            if queue:
                self._waiting.move_to_end(caller)
            if not gone:
                turn.coming.set_result(None)
        if self._waiting and self._free and self._wakes is None and self._per_s is not None:
            pause_s = max(0.001, (1 - self._credit) / self._per_s)
            self._wakes = asyncio.get_running_loop().call_later(pause_s, self._wake)

    def _wake(self) -> None:
        self._wakes = None
        self._grant()


def _less(counts: Counter[str], name: str, count: int) -> None:
    counts[name] -= count
    if not counts[name]:
        del counts[name]
