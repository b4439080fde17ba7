"""Serve's own processes: whether this replica is being stopped, and the end of the controller."""

from __future__ import annotations

import ray
from ray._private.worker import global_worker
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
from ray.serve._private.replica import ReplicaActor


def is_stopping() -> bool:
    """Returns whether Serve is stopping the replica of this process.

    Serve has no public hook for it: it waits for running requests, and calls ``__del__`` only after them.
    """
    return any(
        actor._replica_impl._shutting_down
        for actor in global_worker.actors.values()
        if isinstance(actor, ReplicaActor) and hasattr(actor, "_replica_impl")
    )


def end_controller() -> None:
    """Kills Serve's controller. Ray starts another one, which reads its state back.

    Returns before it has ended. Raises RayError, or ValueError where there is none.
    """
    ray.kill(ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE), no_restart=False)
