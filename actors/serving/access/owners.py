"""Whose request is whose: a number for each key, under which its requests have ids of their own; and, where the
deployment says so, a salt, so that a key finds nothing of others in caches."""

from __future__ import annotations

import hashlib

from outrider.actors.serving.access.guard import Caller
from outrider.actors.serving.connections import Address, peer_of


def tenant_of(caller: Caller | None) -> int:
    """A number for the key, the same in every process: 0 without one, else 1 to 2**63 - 1."""
    return 0 if caller is None else _number(b"tenant\0" + caller.key.name.encode())


def asker_of(caller: Caller | None, address: Address | None) -> int:
    """Likewise, for the address (see peer_of) where there is no key; 0 without either."""
    if caller is not None or address is None:
        return tenant_of(caller)
    return _number(b"peer\0" + peer_of(address).encode())


def _number(name: bytes) -> int:
    return (int.from_bytes(hashlib.sha256(name).digest()[:8], "big") >> 1) or 1


def may_learn_from(caller: Caller | None) -> bool:
    """Whether a drafter may learn from the answers."""
    return caller is None or caller.key.learn


def cache_salt(tenant: int, asked: str | None) -> str | None:
    """Of a request. tenant: 0 where tenants share their caches. asked: the client's own salt. No key can make the salt
    that another one gets."""
    if not tenant:
        return asked
    return hashlib.sha256(f"{tenant}\0{asked or ''}".encode("utf-8", "surrogatepass")).hexdigest()
