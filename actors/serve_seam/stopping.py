"""Whether Serve takes the replica down that this process is. A replica's own code hears of it when all is over."""

from __future__ import annotations

import functools

from ray._private.worker import global_worker
from ray.serve._private.replica import ReplicaActor

from outrider.actors.serve_seam import leans_on


def is_stopping() -> bool:
    """Cheap enough to ask every second. Raises ConfigError the first time where this Ray has other names."""
    _check()
    return any(
        actor._replica_impl._shutting_down
        for actor in global_worker.actors.values()
        if isinstance(actor, ReplicaActor) and hasattr(actor, "_replica_impl")
    )


@functools.cache
def _check() -> None:
    leans_on.INGRESS.check()
