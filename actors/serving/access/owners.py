"""Whose request is whose: a key ends its own requests and nobody else's, and, where the deployment says so, finds
nothing of theirs in caches either."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager

from outrider.actors.serving.access.guard import Caller

_NUMBER = re.compile(r"-[0-9]+$")
"""Of a prompt in a request of several."""


class Owners:
    """Of the requests that an ingress holds, by id. Not thread-safe."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}

    @contextmanager
    def hold(self, request_id: str, caller: Caller | None) -> Iterator[None]:
        """Around a request. An id that is taken stays whose it is: the second request is refused further on."""
        if caller is None or request_id in self._names:
            yield
            return
        self._names[request_id] = caller.key.name
        try:
            yield
        finally:
            del self._names[request_id]

    def owns(self, request_id: str, name: str) -> bool | None:
        """Whether the request is that key's; all that the id could mean, where it could mean several. None: there is
        none here."""
        asked = _spellings(request_id)
        meant = {owner for held, owner in self._names.items() if not asked.isdisjoint(_spellings(held))}
        return meant == {name} if meant else None


def _spellings(request_id: str) -> set[str]:
    """The id as its client chose it, where this may be what vLLM's serving classes make of one."""
    completion = request_id.removeprefix("cmpl-")
    spelt = {request_id, request_id.removeprefix("chatcmpl-"), request_id.removeprefix("resp_"), completion}
    return spelt if completion == request_id else {*spelt, _NUMBER.sub("", completion)}


def tenant_of(caller: Caller | None) -> int:
    """A number for the key, the same in every process: 0 without one, else 1 to 2**63 - 1."""
    if caller is None:
        return 0
    digest = hashlib.sha256(b"tenant\0" + caller.key.name.encode()).digest()
    return (int.from_bytes(digest[:8], "big") >> 1) or 1


def may_learn_from(caller: Caller | None) -> bool:
    """Whether a drafter may learn from the answers."""
    return caller is None or caller.key.learn


def cache_salt(tenant: int, asked: str | None) -> str | None:
    """Of a request. tenant: 0 where tenants share their caches. asked: the client's own salt. No key can make the salt
    that another one gets."""
    if not tenant:
        return asked
    return hashlib.sha256(f"{tenant}\0{asked or ''}".encode("utf-8", "surrogatepass")).hexdigest()
