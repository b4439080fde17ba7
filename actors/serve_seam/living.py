"""Whether another of Serve's processes lives: a replica, a proxy."""

from __future__ import annotations

import logging

import ray
from ray.serve._private.constants import SERVE_NAMESPACE

logger = logging.getLogger("ray.serve.outrider.serving")


def lives(process: str) -> bool:
    """As far as Ray's GCS knows, which is waited for. process: see serving.ways_out.this_process. Another one may go by
    the name of one that is gone."""
    name, actor = process.split(" ")
    try:
        return bool(ray.get_actor(name, namespace=SERVE_NAMESPACE)._actor_id.hex() == actor)
    except ValueError:
        return False
    except ray.exceptions.RayError as error:
        logger.warning("not known whether %s lives: %s", name, error)
        return True
