"""How many replicas of a deployment are running, as this process's routers know it from Serve."""

from __future__ import annotations

from ray.serve.handle import DeploymentHandle

_running: dict[tuple[str, str], int] = {}
"""By application and deployment. Here and not beside the router, whose module Serve pickles: the class would write into
a copy of it."""


def note(app_name: str, deployment: str, replicas: int) -> None:
    _running[app_name, deployment] = replicas


def running_replicas(handle: DeploymentHandle) -> int:
    """0 until the handle has been used."""
    return _running.get((handle.app_name, handle.deployment_name), 0)
