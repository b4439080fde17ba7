"""Chooses the replica with the least work for a request, where cached prompt tokens count as work saved."""

from __future__ import annotations

import math
import random
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from outrider.actors.serving.routing.request_profile import RoutedRequest, block_tokens

SUSPECT_S = 10.0
"""How long a replica that could not be reached gets no requests while there are others."""

_USUAL_TOKENS = 512.0
"""Assumed of another router's request while this router has none of its own to go by."""

DEFAULT_CAPACITY_TOKENS = 1 << 20
"""Assumed size of the KV cache of a replica that has not reported it."""


@dataclass(frozen=True)
class RoutingSettings:
    """Holds the settings of the same names in the section ``serving`` of the configuration."""

    max_ongoing_requests: int
    prefix_affinity: float = 8.0
    max_imbalance_tokens: int = 16384
    seed: int = 0


class RoutingPolicy:
    """Ranks replicas. The same requests, reports and seed give the same choices.

    Candidates are the replicas that have cached the prompt's beginning, and two more: chosen by a hash of that
    beginning, so that independent routers agree, or at random for a prompt shorter than a block. The candidate with
    the lowest score wins, in tokens of work:

        outstanding - prefix_affinity * cached + (answer_tokens if drafts are wanted and it has no drafter)

    A replica with more than max_imbalance_tokens outstanding beyond the least loaded one is no candidate; without any
    candidate the least loaded replica is taken.
    """

    def __init__(self, settings: RoutingSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings, self._clock = settings, clock
        self._index = PrefixIndex()
        self._load = OutstandingWork()
        self._reports: dict[str, Mapping[str, Any]] = {}
        self._suspects: dict[str, float] = {}
        """Replica -> time until which it is avoided."""

        self._random = random.Random(settings.seed)

    @property
    def load(self) -> OutstandingWork:
        return self._load

    def update(self, reports: Mapping[str, Mapping[str, Any]]) -> None:
        """Takes the routing_stats of every replica; those of a new one are empty."""
        for gone in self._reports.keys() - reports.keys():
            self.forget(gone)
        for replica, report in reports.items():
            if report == self._reports.get(replica):
                continue  # an old report: it does not count what was sent since
            self._reports[replica] = report
            if "requests" in report:
                self._load.report(replica, report["requests"])
            if report.get("kv_cache_tokens"):
                self._index.set_capacity(replica, report["kv_cache_tokens"])

    def forget(self, replica: str) -> None:
        self._index.forget(replica)
        self._load.forget(replica)
        self._reports.pop(replica, None)

    def suspect(self, replica: str) -> None:
        """Avoids a replica that could not be reached, for SUSPECT_S. Serve removes it if it is dead."""
        self._suspects[replica] = self._clock() + SUSPECT_S

    def rank(
        self,
        request: RoutedRequest,
        replicas: Sequence[str],
        avoid: Set[str] = frozenset(),
        even_full: bool = False,
    ) -> list[str]:
        """Returns the replicas with room for the request, best first; none while all are full, unless even_full.

        Replicas to avoid, unreachable ones and dead engines are included only if there are no others.
        """
        now = self._clock()
        self._suspects = {replica: until for replica, until in self._suspects.items() if now < until}
        not_serving = (replica for replica, report in self._reports.items() if not report.get("serving", True))
        shunned = {*avoid, *self._suspects, *not_serving}
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
            if request.wants_drafts and not self._reports.get(replica, {}).get("speculation_up", True):
                tokens += request.answer_tokens
            return tokens, order.index(replica)

        most = min(outstanding.values()) + self._settings.max_imbalance_tokens
        candidates = [replica for replica in {*order[:2], *cached} if outstanding.get(replica, math.inf) <= most]
        best = min(candidates, key=score) if candidates else min(order, key=lambda replica: outstanding[replica])
        return [best, *sorted((replica for replica in room if replica != best), key=score)]

    def assign(self, request: RoutedRequest, replica: str, key: str) -> None:
        """Charges the replica with the request until release(replica, key)."""
        self._load.charge(replica, key, request.tokens)
        self._index.insert(replica, request.fingerprint)

    def release(self, replica: str, key: str) -> bool:
        """Ends a charge. Returns False for a key that has none."""
        return self._load.release(replica, key)

    def _order(self, request: RoutedRequest, replicas: list[str]) -> list[str]:
        """Orders replicas by rendezvous hashing of the prompt's beginning; shuffles them for a short prompt."""
        if not request.fingerprint:
            return self._random.sample(sorted(replicas), len(replicas))
        beginning = request.fingerprint[0].to_bytes(8, "little")
        return sorted(replicas, key=lambda name: blake2b(beginning + name.encode(), digest_size=8).digest())


class OutstandingWork:
    """Counts each replica's unfinished work in tokens, prompt and expected answer.

    Requests of this router are counted exactly; those of others are estimated from the replicas' reports.
    """

    def __init__(self) -> None:
        self._charges: defaultdict[str, dict[str, list[int]]] = defaultdict(dict)
        """Replica -> key -> tokens of each call; several calls of one request can share a key."""

        self._tokens: defaultdict[str, int] = defaultdict(int)
        self._requests: defaultdict[str, int] = defaultdict(int)
        self._foreign_requests: dict[str, int] = {}

    def charge(self, replica: str, key: str, tokens: int) -> None:
        self._charges[replica].setdefault(key, []).append(tokens)
        self._tokens[replica] += tokens
        self._requests[replica] += 1

    def release(self, replica: str, key: str) -> bool:
        """Ends one charge of that key. Returns False when there is none."""
        charges = self._charges.get(replica, {}).get(key)
        if not charges:
            return False
        self._tokens[replica] -= charges.pop()
        self._requests[replica] -= 1
        if not charges:
            del self._charges[replica][key]
        return True

    def report(self, replica: str, requests: int) -> None:
        """Takes the number of requests that the replica has from all routers."""
        self._foreign_requests[replica] = max(0, requests - self._requests[replica])

    def forget(self, replica: str) -> None:
        for table in (self._charges, self._tokens, self._requests, self._foreign_requests):
            table.pop(replica, None)

    def requests(self, replica: str) -> int:
        """Returns how many requests of this router the replica has."""
        return self._requests.get(replica, 0)

    def tokens(self, replica: str) -> float:
        """Returns the outstanding tokens. Requests of other routers count as much as the mean of this one's."""
        foreign = self._foreign_requests.get(replica, 0)
        return self._tokens.get(replica, 0) + foreign * self._mean_tokens() if foreign else self._tokens.get(replica, 0)

    def _mean_tokens(self) -> float:
        requests = sum(self._requests.values())
        return sum(self._tokens.values()) / requests if requests else _USUAL_TOKENS


class PrefixIndex:
    """Estimates what each replica's prefix cache holds: block hashes in order of use, up to the size of its KV cache.

    Engines do not report what they evict. A wrong estimate costs a prefill, never a wrong answer.
    """

    def __init__(self) -> None:
        self._blocks: dict[str, OrderedDict[int, int]] = {}
        """Replica -> hash of a block -> tokens of the block, least recently used first."""

        self._tokens: dict[str, int] = {}
        self._capacities: dict[str, int] = {}

    def insert(self, replica: str, fingerprint: Sequence[int]) -> None:
        """Records that the replica was given a prompt with this fingerprint."""
        blocks = self._blocks.setdefault(replica, OrderedDict())
        # Last block first, so that a chain is evicted from its end: without its beginning it matches nothing.
        for number in range(len(fingerprint) - 1, -1, -1):
            block = fingerprint[number]
            if block in blocks:
                blocks.move_to_end(block)
            else:
                blocks[block] = block_tokens(number)
                self._tokens[replica] = self._tokens.get(replica, 0) + block_tokens(number)
        self._evict(replica)

    def match(self, fingerprint: Sequence[int]) -> dict[str, int]:
        """Returns the cached tokens of the prompt's beginning by replica, without those that have none."""
        found = {}
        for replica, blocks in self._blocks.items():
            tokens = 0
            for number, block in enumerate(fingerprint):
                if block not in blocks:
                    break
                tokens += block_tokens(number)
            if tokens:
                found[replica] = tokens
        return found

    def set_capacity(self, replica: str, tokens: int) -> None:
        """Sets the size of the replica's KV cache."""
        self._capacities[replica] = tokens
        self._evict(replica)

    def forget(self, replica: str) -> None:
        for table in (self._blocks, self._tokens, self._capacities):
            table.pop(replica, None)

    def num_tokens(self, replica: str) -> int:
        return self._tokens.get(replica, 0)

    def _evict(self, replica: str) -> None:
        blocks, capacity = self._blocks.get(replica), self._capacities.get(replica, DEFAULT_CAPACITY_TOKENS)
        while blocks and self._tokens[replica] > capacity:
            self._tokens[replica] -= blocks.popitem(last=False)[1]
