"""Processes of Serve's, their lives and ends: whether another one lives, whether the replica that this one is has to
end, and the controller's end."""

from __future__ import annotations

import functools
import logging

import ray
from ray._private.worker import global_worker
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
from ray.serve._private.replica import ReplicaActor

from outrider.actors.serve_seam import leans_on

logger = logging.getLogger("ray.serve.outrider.serving")


def lives(process: str) -> bool:
    """A replica, a proxy, as far as Ray's GCS knows, which is waited for. process: see serving.ways_out.this_process.
    Another one may go by the name of one that is gone."""
    name, actor = process.split(" ")
    try:
        return bool(ray.get_actor(name, namespace=SERVE_NAMESPACE)._actor_id.hex() == actor)
    except ValueError:
        return False
    except ray.exceptions.RayError as error:
        logger.warning("not known whether %s lives: %s", name, error)
        return True


def is_stopping() -> bool:
    """Whether Serve takes the replica down that this process is: its own code hears of it when all is over. Cheap
    enough to ask every second. Raises ConfigError the first time where this Ray has other names."""
    _check()
    return any(
        actor._replica_impl._shutting_down
        for actor in global_worker.actors.values()
        if isinstance(actor, ReplicaActor) and hasattr(actor, "_replica_impl")
    )


@functools.cache
def _check() -> None:
    leans_on.INGRESS.check()


def end_controller() -> None:
    """So that Ray starts another, which reads its state back: nobody else replaces one that lives and stands still.
    Returns before it has ended; a process that is stopped stays beside the new one until it goes on. Raises RayError,
    ValueError where there is none."""
    ray.kill(ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE), no_restart=False)
