"""Whose request is whose: a number for each key, under which its requests have ids of their own; and, where the
deployment says so, a salt, so that a key finds nothing of others in caches."""

from __future__ import annotations

import hashlib

from outrider.actors.serving.access.guard import Caller


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
