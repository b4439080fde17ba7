"""Starts what a replica consists of on its placement group: the drafter actor, and vLLM's configuration of the target.

Serve replicas (``replica.py``, ``drafter_pool.py``) and the library (``deploy/llm``) share it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import ray

from outrider.actors.drafter.actor import launch_drafter
from outrider.actors.observability.environment import process_environment
from outrider.cluster.config import OutriderConfig
from outrider.cluster.placement import (
    V1_RUNNER,
    CorePlan,
    RankPlacement,
    ReplicaPlacement,
    float32_environment,
    rank_environment,
)
from outrider.cluster.registry import registry_name


@dataclass(frozen=True)
class Launch:
    """Holds a replica's place in a Ray cluster, and starts its drafter there.

    Args:
        replica: Unique id, part of its actors' names.
        ray_address: GCS address of the cluster.
        group: Placement group with the bundles of ``placement``.
        core_plan: Cores by rank; None on GPUs.
        num_common_tokens: Only ids below it are drafted. None: all that both models have.
    """

    config: OutriderConfig
    replica: str
    ray_address: str
    group: Any
    placement: ReplicaPlacement
    core_plan: CorePlan | None
    num_common_tokens: int | None = None

    @classmethod
    def of_replica(
        cls,
        config: OutriderConfig,
        replica: str,
        placement: ReplicaPlacement,
        core_plan: CorePlan | None,
        num_common_tokens: int | None,
    ) -> Launch:
        """Returns the place of the Serve replica that runs here, which has a placement group of its own."""
        address, group = ray.get_runtime_context().gcs_address, ray.util.get_current_placement_group()
        return cls(config, replica, address, group, placement, core_plan, num_common_tokens)

    def start_drafter(self) -> Any:
        """Starts the replica's own drafter actor. Returns its handle at once, while the model loads."""
        assert self.config.remote_drafter is not None
        return launch_drafter(
            self.config.remote_drafter,
            self.config.speculation,
            num_common_tokens=self.num_common_tokens,
            replica=self.replica,
            app_name=self.config.serving.app_name,
            ray_address=self.ray_address,
            group=self.group,
            placement=self.placement,
            cores=self._cores("drafter"),
            environment=process_environment(self.config.serving),
        )

    def target_vllm_config(self) -> Any:
        """Returns the target's VllmConfig, on its ranks' bundles, cores and actor names. Imports vLLM.

        Raises:
            ConfigError: Names the section of what vLLM refuses.
        """
        from outrider.actors.vllm_adapter.engine_args import target_vllm_config

        config, target = self.config, self.config.target
        runner = {} if config.co_located is not None else V1_RUNNER
        os.environ.update(runner)
        cores = self._cores("target")
        names = [f"TargetRank-{rank}:{self.replica}" for rank in range(target.num_ranks)]
        names[target.verifier_rank] = f"Verifier:{self.replica}"
        environment = {
            **rank_environment(cores),
            **float32_environment(target.dtype),
            **runner,
            **process_environment(config.serving),
        }
        ranks = RankPlacement(self.ray_address, names, list(self.placement.target_bundle_indices), cores, environment)
        vllm_config = target_vllm_config(config, ranks, self.group)
        vllm_config.additional_config["outrider_replica"] = {
            "replica": self.replica,
            "registry": registry_name(config.serving.app_name),
        }
        return vllm_config

    def _cores(self, side: str) -> list[list[int]] | None:
        if self.core_plan is None:
            return None
        return [list(cores) for cores in getattr(self.core_plan, side)]
