"""What keys use, and when one has used what it may. Pure.

Requests and tokens are buckets that hold a minute's worth and are refilled evenly: a key that was idle may use a
minute's worth at once. Tokens are counted when they exist, so that a request is admitted while anything is left, and
what it then uses beyond that has to be made up for before the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from outrider.actors.serving.access.keys import MOST_KEYS, Key
from outrider.actors.serving.capacity import part_of


@dataclass
class Bucket:
    """level: what is left, negative where more was used than there was."""

    capacity: float
    level: float
    at_s: float

    @classmethod
    def full(cls, a_minute: float, now_s: float) -> Bucket:
        return cls(a_minute, a_minute, now_s)

    def refill(self, a_minute: float, now_s: float) -> None:
        """a_minute: the limit as it is now, which may have been changed."""
        self.level = min(a_minute, self.level + (now_s - self.at_s) * a_minute / 60)
        self.capacity, self.at_s = a_minute, now_s

    def seconds_until(self, level: float) -> float:
        return max(0.0, (level - self.level) * 60 / self.capacity)


class LimitReached(Exception):
    """limit: the field of the key. retry_after_s: when there may be room again; None: when a request ends."""

    def __init__(self, limit: str, most: int, retry_after_s: float | None) -> None:
        super().__init__(limit, most, retry_after_s)
        self.limit, self.most, self.retry_after_s = limit, most, retry_after_s


class _Used:
    def __init__(self) -> None:
        self.running = 0
        self.requests: Bucket | None = None
        self.tokens: Bucket | None = None


class Limits:
    """Of all keys, as far as this process sees their requests. Not thread-safe."""

    def __init__(self, clock: Callable[[], float], parts: int = 1) -> None:
        """parts: of processes that keep the limits between them, each its part; see part_of."""
        self._clock, self._parts = clock, parts
        self._used: dict[str, _Used] = {}

    @contextmanager
    def running(self, key: Key, *, generates: bool) -> Iterator[None]:
        """Around a request. generates: it uses tokens. Raises LimitReached before it begins."""
        used = self._of(key)
        self._admit(key, used, generates)
        used.running += 1
        try:
            yield
        finally:
            used.running -= 1

    def count_tokens(self, key: Key, number: int) -> None:
        if key.tokens_per_minute is not None:
            self._tokens(key, self._of(key)).level -= number

    def _admit(self, key: Key, used: _Used, generates: bool) -> None:
        if key.concurrent_requests is not None and used.running >= part_of(key.concurrent_requests, self._parts):
            raise LimitReached("concurrent_requests", key.concurrent_requests, None)
        if generates and key.tokens_per_minute is not None and (tokens := self._tokens(key, used)).level <= 0:
            raise LimitReached("tokens_per_minute", key.tokens_per_minute, tokens.seconds_until(1))
        if key.requests_per_minute is None:
            return
        a_minute = part_of(key.requests_per_minute, self._parts)
        used.requests = used.requests or Bucket.full(a_minute, self._clock())
        used.requests.refill(a_minute, self._clock())
        if used.requests.level < 1:
            raise LimitReached("requests_per_minute", key.requests_per_minute, used.requests.seconds_until(1))
        used.requests.level -= 1

    def _tokens(self, key: Key, used: _Used) -> Bucket:
        assert key.tokens_per_minute is not None
        a_minute = part_of(key.tokens_per_minute, self._parts)
        used.tokens = used.tokens or Bucket.full(a_minute, self._clock())
        used.tokens.refill(a_minute, self._clock())
        return used.tokens

    def _of(self, key: Key) -> _Used:
        used = self._used.get(key.name)
        if used is None:
            if len(self._used) >= 2 * MOST_KEYS:  # of files that have come and gone
                self._used = {name: each for name, each in self._used.items() if each.running}
            used = self._used[key.name] = _Used()
        return used
