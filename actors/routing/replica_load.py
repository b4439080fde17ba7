"""How much work each replica has before it, in tokens, as far as one router can know."""

from __future__ import annotations

from collections import defaultdict


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
