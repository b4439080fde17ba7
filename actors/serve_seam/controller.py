"""Serve's controller, ended so that Ray starts another: nobody else replaces one that lives and stands still."""

from __future__ import annotations

import ray
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE


def end_controller() -> None:
    """Returns before it has ended. Ray starts it again, and it reads its state back. A process that is stopped stays
    beside the new one until it goes on. Raises RayError, ValueError where there is none."""
    ray.kill(ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE), no_restart=False)
