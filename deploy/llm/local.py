"""Runs one target with its drafter from a Python process, on a Ray cluster of its own or one that is there."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group

from outrider.actors.drafter.actor import drafter_name
from outrider.actors.serving.launch import Launch
from outrider.actors.serving.registry_client import RegistryClient
from outrider.cluster.config import ConfigError, OutriderConfig
from outrider.cluster.device_defaults import with_device_defaults
from outrider.cluster.drafter_registry import Member, fingerprint
from outrider.deploy.app import engine_on_gpu, plan_replica
from outrider.deploy.models.check import check_models, num_common_tokens
from outrider.deploy.ray_cluster import start_ray

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("outrider")

SAID_EVERY_S = 60.0
LINK_WITHIN_S = 60.0
"""Seconds within which a loaded drafter must be linked."""


class LocalReplica:
    """Holds the cluster, the placement group, the drafter actor and the registration of one target.

    Everything it starts ends with ``close``, also a Ray cluster that was not there before.

    Raises:
        ConfigError: Names what is wrong with checkpoints, cores or settings.
    """

    def __init__(self, config: OutriderConfig) -> None:
        check_models(config)
        if config.remote_drafter is not None and config.remote_drafter.pooled:
            raise ConfigError("speculative_config.placement: a pool of drafters needs a server; use outrider serve")
        replica = secrets.token_hex(4)
        serving = config.serving.model_copy(update={"app_name": f"llm-{replica}", "gateway": "off"})
        self.config = with_device_defaults(config.model_copy(update={"serving": serving}), gpu=engine_on_gpu())
        plan = plan_replica(self.config)
        for warning in plan.warnings:
            logger.warning("%s", warning)
        self._started_ray = not ray.is_initialized()
        self._group: Any = None
        self._drafter: Any = None
        self._registry: RegistryClient | None = None
        try:
            if self._started_ray:
                start_ray(plan.total("CPU", 1, 0), logger.warning, address=os.environ.get("RAY_ADDRESS"))
            self._group = _bundles(plan.placement)
            self._launch = Launch(
                self.config,
                replica,
                ray.get_runtime_context().gcs_address,
                self._group,
                plan.placement,
                plan.cores,
                num_common_tokens(self.config),
            )
            drafter = self.config.remote_drafter
            owned = None if drafter is None else drafter_name(replica)
            member = Member(replica, owned, fingerprint=fingerprint(self.config))
            self._registry = RegistryClient(self.config.serving.app_name, member)
            if drafter is not None:
                self._drafter = self._launch.start_drafter()
        except BaseException:
            self.close()
            raise

    def vllm_config(self) -> VllmConfig:
        """Returns the target's configuration for one of vLLM's engines."""
        return self._launch.target_vllm_config()

    def wait_for_drafter(self) -> None:
        """Returns when the drafter has loaded. Raises RayError where it does not load."""
        if self._drafter is not None:
            ray.get(self._drafter.ready.remote())

    def wait_for_link(self, status: Callable[[], Sequence[Mapping[str, Any] | None]]) -> None:
        """Returns when target and drafter are linked. status: asks all ranks for ``round_status``."""
        if self._drafter is None:
            return
        deadline = time.monotonic() + LINK_WITHIN_S
        while (link := next(each for each in status() if each is not None)["link"])["state"] != "up":
            if time.monotonic() > deadline:
                raise ConfigError(f"link: no link to the drafter within {LINK_WITHIN_S:g} s: {link['last_error']}")
            time.sleep(0.05)

    def close(self) -> None:
        """Ends the drafter, gives the bundles back, and ends a Ray cluster that this object started."""
        if not ray.is_initialized():
            return
        with suppress(ray.exceptions.RayError, ConnectionError):
            if self._drafter is not None:
                ray.kill(self._drafter)
            if self._registry is not None:
                self._registry.leave(wait_s=1.0)
            if self._group is not None:
                remove_placement_group(self._group)
        self._drafter = self._registry = self._group = None
        if self._started_ray:
            ray.shutdown()


def _bundles(placement: Any) -> Any:
    """Returns a placement group once it has its bundles; says once a minute that it waits for them."""
    labels = [dict(labels) for labels in placement.labels] if any(placement.labels) else None
    bundles = [dict(bundle) for bundle in placement.bundles]
    group = placement_group(bundles, placement.strategy, bundle_label_selector=labels)
    while not ray.wait([group.ready()], timeout=SAID_EVERY_S)[0]:
        logger.warning("waiting for %s on the Ray cluster, which has %s free", bundles, ray.available_resources())
    return group
