"""How much work each replica has before it, in tokens, as far as one router can know.

What a target replica tells the routers about itself, every couple of seconds.

Which replica a request goes to: the one with the least to do, where cached prompt tokens count as work saved.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from outrider.actors.serving.routing.prefix import PrefixIndex


class ReplicaLoad:
    """What this router gave out and has not got back, to the request; and from the replicas' own reports, what other
    callers gave them.

    A request is charged with all its tokens, prompt and expected answer, until it ends.
    """

    def __init__(self) -> None:
        self._charges: defaultdict[str, dict[str, list[int]]] = defaultdict(dict)
        """By replica and key: tokens. One request's calls can share a key."""

        self._tokens: defaultdict[str, int] = defaultdict(int)
        self._requests: defaultdict[str, int] = defaultdict(int)
        self._foreign_requests: dict[str, int] = {}

    def charge(self, replica: str, key: str, tokens: int) -> None:
        self._charges[replica].setdefault(key, []).append(tokens)
        self._tokens[replica] += tokens
        self._requests[replica] += 1

    def release(self, replica: str, key: str) -> bool:
        """Undo one charge of that key. False when there is none, as for calls that are not charged."""
        charges = self._charges.get(replica, {}).get(key)
        if not charges:
            return False
        self._tokens[replica] -= charges.pop()
        self._requests[replica] -= 1
        if not charges:
            del self._charges[replica][key]
        return True

    def report(self, replica: str, requests: int) -> None:
        """The replica counts so many requests, of all callers."""
        self._foreign_requests[replica] = max(0, requests - self._requests[replica])

    def forget(self, replica: str) -> None:
        for table in (self._charges, self._tokens, self._requests, self._foreign_requests):
            table.pop(replica, None)

    def requests(self, replica: str) -> int:
        """That this router gave to the replica."""
        return self._requests.get(replica, 0)

    def tokens(self, replica: str) -> float:
        """Outstanding; those of other callers' requests are taken to be like our own."""
        foreign = self._foreign_requests.get(replica, 0)
        return self._tokens.get(replica, 0) + foreign * self._mean_tokens() if foreign else self._tokens.get(replica, 0)

    def _mean_tokens(self) -> float:
        requests = sum(self._requests.values())
        return sum(self._tokens.values()) / requests if requests else _USUAL_TOKENS


_USUAL_TOKENS = 512.0
"""Of a request, while there is none of our own to go by."""


_LINK_TIMEOUT_S = 1.0
"""An engine in the middle of a long step answers late; what it said last is good enough."""


class RoutingStats:
    """load: ``running`` and ``waiting`` requests. kv_cache_tokens: what the KV cache holds. link_is_up: asks the
    engine's rank 0; None without a drafter. check_health: raises when the engine is dead.
    """

    def __init__(
        self,
        load: Callable[[], Mapping[str, Any]],
        kv_cache_tokens: int,
        link_is_up: Callable[[], Awaitable[bool]] | None,
        check_health: Callable[[], Awaitable[None]],
    ) -> None:
        self._load, self._kv_cache_tokens = load, kv_cache_tokens
        self._link_is_up, self._check_health = link_is_up, check_health
        self._speculation_up = True

    async def collect(self) -> dict[str, Any]:
        """Plain values, few of them: Serve sends them to every router when they change."""
        try:
            await self._check_health()
        except Exception:  # noqa: BLE001 - a dead engine, of whatever; Serve's health check reports it
            return {"serving": False}
        if self._link_is_up is not None:
            with suppress(TimeoutError):
                self._speculation_up = await asyncio.wait_for(self._link_is_up(), _LINK_TIMEOUT_S)
        load = self._load()
        return {
            "serving": True,
            "requests": load["running"] + load["waiting"],
            "kv_cache_tokens": self._kv_cache_tokens,
            "speculation_up": self._speculation_up,
        }


SUSPECT_S = 10.0
"""How long a replica that could not be reached is left out, while there are others."""


@dataclass(frozen=True)
class RoutingSettings:
    """See serving in the configuration."""

    max_ongoing_requests: int
    prefix_affinity: float = 8.0
    max_imbalance_tokens: int = 16384
    seed: int = 0


@dataclass(frozen=True)
class RoutedRequest:
    """What the policy knows of a request."""

    fingerprint: tuple[int, ...] = ()
    prompt_tokens: int = 0
    """Estimated, but for prompts of token ids."""

    answer_tokens: int = 0
    """Expected, of all answers together."""

    wants_drafts: bool = False
    avoid: frozenset[str] = frozenset()
    """Replicas that have just failed it."""

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.answer_tokens


class RoutingPolicy:
    """Deterministic: the same requests, reports and seed give the same choices.

    Candidates are the replicas that have the prompt's beginning, and two others: taken by hash of that beginning, so
    that routers that know nothing of each other agree, or at random for a prompt too short to have one. The candidate
    with the lowest score wins, in tokens of work:

        outstanding - prefix_affinity * cached + (answer_tokens if drafts are wanted and it has no drafter)

    A replica with more than max_imbalance_tokens outstanding beyond the least loaded one gets nothing, whatever it has
    cached; if that is true of all candidates, the least loaded replica is taken. That bounds what a popular prefix can
    pile up.
    """

    def __init__(self, settings: RoutingSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings, self._clock = settings, clock
        self._index = PrefixIndex()
        self._load = ReplicaLoad()
        self._reports: dict[str, Mapping[str, Any]] = {}
        self._without_drafter: set[str] = set()
        self._not_serving: set[str] = set()
        self._suspects: dict[str, float] = {}
        """By replica: when it is to be trusted again."""

        self._random = random.Random(settings.seed)

    @property
    def load(self) -> ReplicaLoad:
        return self._load

    def update(self, reports: Mapping[str, Mapping[str, Any]]) -> None:
        """The replicas there are, each with its routing_stats: empty until it has sent some."""
        for gone in self._reports.keys() - reports.keys():
            self.forget(gone)
        for replica, report in reports.items():
            if report == self._reports.get(replica):
                continue  # of old: what we gave out and got back since is not in it
            self._reports[replica] = report
            if "requests" in report:
                self._load.report(replica, report["requests"])
            if report.get("kv_cache_tokens"):
                self._index.set_capacity(replica, report["kv_cache_tokens"])
            _put(self._without_drafter, replica, not report.get("speculation_up", True))
            _put(self._not_serving, replica, not report.get("serving", True))

    def forget(self, replica: str) -> None:
        self._index.forget(replica)
        self._load.forget(replica)
        self._without_drafter.discard(replica)
        self._not_serving.discard(replica)
        self._suspects.pop(replica, None)
        self._reports.pop(replica, None)

    def suspect(self, replica: str) -> None:
        """It could not be reached: it may be dead, which Serve will tell, or only its node's network slow."""
        self._suspects[replica] = self._clock() + SUSPECT_S

    def rank(self, request: RoutedRequest, replicas: Sequence[str], even_full: bool = False) -> list[str]:
        """Replicas with room for the request, best first. Those to avoid are in it only if there are no others.

        Empty while all are full, unless full ones count too.
        """
        now = self._clock()
        suspects = (replica for replica, until in self._suspects.items() if now < until)
        shunned = {*request.avoid, *suspects, *self._not_serving}
        wanted = [replica for replica in replicas if replica not in shunned] or list(replicas)
        limit = self._settings.max_ongoing_requests
        room = [replica for replica in wanted if even_full or self._load.requests(replica) < limit]
        if not room:
            return []
        cached = self._index.match(request.fingerprint) if self._settings.prefix_affinity else {}
        outstanding = {replica: self._load.tokens(replica) for replica in room}
        order = self._order(request, room)

        def score(replica: str) -> tuple[float, int]:
            tokens = outstanding[replica] - self._settings.prefix_affinity * cached.get(replica, 0)
            if request.wants_drafts and replica in self._without_drafter:
                tokens += request.answer_tokens
            return tokens, order.index(replica)

        most = min(outstanding.values()) + self._settings.max_imbalance_tokens
        candidates = [replica for replica in {*order[:2], *cached} if outstanding.get(replica, math.inf) <= most]
        best = min(candidates, key=score) if candidates else min(order, key=lambda replica: outstanding[replica])
        return [best, *sorted((replica for replica in room if replica != best), key=score)]

    def assign(self, request: RoutedRequest, replica: str, key: str) -> None:
        """The request goes to replica. key: under which release will be called."""
        self._load.charge(replica, key, request.tokens)
        self._index.insert(replica, request.fingerprint)

    def release(self, replica: str, key: str) -> bool:
        """The request is over, or was not sent after all. False for a key that was not assigned."""
        return self._load.release(replica, key)

    def _order(self, request: RoutedRequest, replicas: list[str]) -> list[str]:
        """The same for every router and every prompt that begins alike (rendezvous hashing); else shuffled."""
        if not request.fingerprint:
            return self._random.sample(sorted(replicas), len(replicas))
        beginning = request.fingerprint[0].to_bytes(8, "little")
        return sorted(replicas, key=lambda name: blake2b(beginning + name.encode(), digest_size=8).digest())


def _put(names: set[str], name: str, belongs: bool) -> None:
    (names.add if belongs else names.discard)(name)
