"""Starts a Ray cluster that ends with this process, or connects to one that others have started."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from pathlib import Path

import ray

from outrider.actors.serve_adapter.ray_processes import wait_longer_for_node
from outrider.cluster.config_section import ConfigError
from outrider.cluster.placement import NAMESPACE

OBJECT_STORE_BYTES = 256 << 20
"""Nothing large travels through Ray's object store: tokens are a few hundred bytes a round."""

RAY_STARTS_WITHIN_S = 300.0

WORKER_NICENESS = ("RAY_worker_niceness", "0")
"""Ray runs its workers at 15 unless told otherwise, which is meant for batches: proxies, ranks and drafters would wait
for whatever else runs on their machine, their own clients included."""


def start_ray(
    needed_cpus: float,
    say: Callable[[str], None],
    *,
    address: str | None = None,
    dashboard: bool = False,
    verbose: bool = False,
) -> Path | None:
    """Initialises Ray in this process.

    Args:
        needed_cpus: logical CPUs of all bundles: ranks that share cores still need a bundle each.
        say: takes a line about a node that starts slowly.
        address: of a cluster that is there. None: a new one, which ends with this process.
        dashboard: `ray list actors` asks it. It listens on this machine alone.

    Returns:
        The logs of a new cluster; None for one that was there.

    Raises:
        ConfigError: this machine is too busy.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault(*WORKER_NICENESS)
    logs = {"log_to_driver": verbose, "logging_level": logging.INFO if verbose else logging.ERROR}
    if address:
        ray.init(address, namespace=NAMESPACE, **logs)
        return None
    num_cpus = max(os.cpu_count() or 1, math.ceil(needed_cpus))
    try:
        with wait_longer_for_node(RAY_STARTS_WITHIN_S, say):
            context = ray.init(
                "local",  # never another cluster that runs here
                namespace=NAMESPACE,
                num_cpus=num_cpus,
                object_store_memory=OBJECT_STORE_BYTES,
                include_dashboard=dashboard,
                dashboard_host="127.0.0.1",
                **logs,
            )
    except Exception as error:
        if "timed out during startup" in str(error):
            raise ConfigError(
                f"Ray: its node has not come up within {RAY_STARTS_WITHIN_S:g} s; end what else keeps this machine "
                "busy, and start again"
            ) from None
        raise
    return Path(context.address_info["session_dir"]) / "logs"
