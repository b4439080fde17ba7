"""The guard of this process: a proxy's, whose settings come by its environment, or the ingress's.

Proxies hold each key to its requests a minute and its concurrent requests as far
as they see them, one process a node, and charge for what is refused likewise; the ingress sees them all, and counts
tokens. Where there are several of it, each holds keys to its part.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ray.util.metrics import Counter, Gauge

from outrider.actors.observability.metrics import METRICS
from outrider.actors.serving.access.budget import Budget
from outrider.actors.serving.access.files import Reloading
from outrider.actors.serving.access.guard import Guard
from outrider.actors.serving.access.keys import KeyRing, load_keys
from outrider.actors.serving.access.settings import proxy_access
from outrider.cluster.limits import from_environment

REFUSED_SECONDS_PER_MINUTE = 3.0
"""Where keys are asked for, and limits.refused_seconds_per_minute is not set."""


def reloading_keys(
    path: str, on_look: Callable[[Reloading[KeyRing]], object] = lambda files: None
) -> Reloading[KeyRing]:
    """Read by a thread: a thousand keys take a while, in which answers go on. on_look: see Reloading. Raises
    ConfigError."""
    keys = Reloading([path], lambda: load_keys(path), on_look=on_look)
    keys.watch()
    return keys


@functools.cache
def proxy_guard() -> Guard | None:
    """Of this process. None: no key is asked for, and nothing is charged. Raises ConfigError."""
    access = proxy_access()
    keys_file = None if access is None else access.keys_file
    allowed_s = from_environment().refused_seconds_per_minute
    if allowed_s is None and keys_file is not None:
        allowed_s = REFUSED_SECONDS_PER_MINUTE
    if keys_file is None and not allowed_s:
        return None
    description = (
        "Calls that a proxy refused for their key, or for what was refused before, by the key's name in the file "
        "('-': none is known)."
    )
    refusals = Counter("outrider_proxy_key_refusals", description, ("api", "key", "reason"))

    def count(api: str, key: str, reason: str) -> None:
        refusals.inc(tags={"api": api, "key": key, "reason": reason})

    keys = None
    if keys_file is not None:
        keys = reloading_keys(keys_file, stale_gauge("keys"))
    return Guard(keys, budget=Budget(allowed_s) if allowed_s else None, on_refusal=count)


def stale_gauge(what: str) -> Callable[[Reloading[Any]], None]:
    """For `Reloading`: tells Ray's metrics whether the files on disk are in use."""
    description = "1 while changed files of keys or certificates cannot be used, and older ones are."
    gauge = Gauge("outrider_proxy_access_stale", description, ("files",))
    gauge.set_default_tags({"files": what})
    gauge.set(0.0)

    def tell(files: Reloading[Any]) -> None:
        gauge.set(float(files.problem is not None))

    return tell


_ingress: list[Guard] = []


def guard_ingress(keys_file: str | None, num_ingresses: int = 1) -> None:
    """For the ingress, before its first call. Raises ConfigError."""
    _ingress.clear()
    METRICS.keys = None
    if keys_file is None:
        return
    keys = reloading_keys(keys_file)
    METRICS.keys = keys
    _ingress.append(
        Guard(
            keys,
            parts=num_ingresses,
            on_refusal=lambda api, key, reason: METRICS.key_refused(key, reason),
            on_request=METRICS.key_request,
            on_tokens=METRICS.key_tokens,
        )
    )


def ingress_guard() -> Guard | None:
    """None: no key is asked for."""
    return _ingress[0] if _ingress else None
