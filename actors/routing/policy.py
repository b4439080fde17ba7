"""Which replica a request goes to: the one with the least to do, where cached prompt tokens count as work saved."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from actors.routing.prefix_index import PrefixIndex
from actors.routing.replica_load import ReplicaLoad

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
