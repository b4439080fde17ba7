"""Runs vLLM's ranks as Ray actors on the bundles, cores and actor names of a RankPlacement.

It differs from vLLM's ``RayExecutorV2``:

- It connects to a given cluster and namespace and uses the placement group it is given. vLLM's insists on a Ray device
  key, which the CPU platform lacks.
- It names and places each rank, and sets the placement's environment variables.
- It binds a CPU rank's threads to the rank's cores before torch starts any.
- Its ranks rendezvous at a store that listens on one address only.
- It asks for drafts together with the step that they follow, or samples in the call that starts the step.
- On a CPU its processes sleep early while they wait for messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.util import placement_group_table
from vllm import envs
from vllm.distributed.device_communicators import shm_broadcast
from vllm.platforms import current_platform
from vllm.utils.network_utils import get_distributed_init_method
from vllm.v1.executor import ray_executor_v2
from vllm.v1.executor.ray_executor_v2 import RayExecutorV2, RayWorkerProc

from outrider.actors.vllm_adapter.async_drafts import AsyncDraftVllmConfig
from outrider.cluster.link.rendezvous import open_store
from outrider.cluster.placement import NAMESPACE, RankPlacement, bind_to

_CPU_SPIN_S = 0.0005
"""How long a process may spin on a CPU before it sleeps. vLLM's second outlasts any step and takes a core from the
models: with target and drafter on one core each, a third of both."""

_CPU_RECHECK_MS = 5
"""How often a sleeper looks for messages. About one notification in a thousand is lost, and vLLM's 5 s would stop the
engine for that long."""


class RankProc(RayWorkerProc):
    """Runs vLLM's worker in one rank's process, after binding the process to its cores."""

    def __init__(self, vllm_config: Any, rank: int, *args: Any, **kwargs: Any) -> None:
        cores = RankPlacement.of(vllm_config).cores
        if cores is not None:
            bind_to(cores[rank])
        if not current_platform.is_cpu():
            # vLLM lets ranks span nodes only under its own name for Ray. This copy of the config is the rank's own.
            vllm_config.parallel_config.distributed_executor_backend = "ray"
        super().__init__(vllm_config, rank, *args, **kwargs)

    def _init_message_queues(self, *args: Any) -> None:
        super()._init_message_queues(*args)
        sleep_early(self.rpc_broadcast_mq)

    def create_dist_init_method(self) -> str:
        """Opens the store at which the ranks rendezvous, on rank 0.

        Any peer that reaches the store can write to it, and vLLM's listens on every interface. This one listens on one
        address, which is loopback for a single rank.
        """
        world_size = self._parallel_config.world_size
        host = "127.0.0.1" if world_size == 1 else ray.util.get_node_ip_address()
        # vLLM's attribute: the server has to live until init_process_group opens the same store.
        self._dist_init_store = open_store(host, world_size, shared=True)
        return get_distributed_init_method(host, self._dist_init_store.port)

    def get_node_and_physical_gpu_ids(self) -> tuple[str, list[int]]:
        if current_platform.is_cpu():
            return ray.get_runtime_context().get_node_id(), []
        return super().get_node_and_physical_gpu_ids()


class RayRanksExecutor(RayExecutorV2):
    """Runs an engine's ranks as named Ray actors. Needs ``parallel_config.placement_group`` and a RankPlacement."""

    def _init_executor(self) -> None:
        self._placement = RankPlacement.of(self.vllm_config)
        # With vLLM's own drafting, sampling is a separate call, and most methods return no drafts.
        speculative = self.vllm_config.speculative_config
        has_remote_drafter = speculative is not None and speculative.method == "custom_class"
        self._schedules_ahead = isinstance(self.vllm_config, AsyncDraftVllmConfig)
        self._asks_for_drafts_early = has_remote_drafter and not self._schedules_ahead
        overlaps = speculative is None and self.vllm_config.scheduler_config.async_scheduling
        self._samples_in_execute = self._schedules_ahead or overlaps
        """A step's tokens come with the call that starts it, see TargetWorker.execute_model."""

        self._drafts: Any = None
        self._chosen: Any = None
        """The result of a step that samples in the same call."""

        self._masks_are_due = False
        """A step runs whose masks need the tokens of the step before it."""

        with self._replace_vllm_names():
            super()._init_executor()
        for queue in self.response_mqs:
            sleep_early(queue)

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        output = super().execute_model(scheduler_output, non_block=non_block)
        self._masks_are_due = scheduler_output.pending_structured_output_tokens
        if scheduler_output.total_num_scheduled_tokens and not scheduler_output.has_structured_output_requests:
            self._ask_for_drafts()
            self._chosen = output if self._samples_in_execute else None
        return output

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        if self._chosen is not None:
            chosen, self._chosen = self._chosen, None
            return chosen
        self._masks_are_due = False
        output = super().sample_tokens(grammar_output, non_block=non_block)
        self._ask_for_drafts()
        return output

    def take_draft_token_ids(self) -> Any:
        if self._schedules_ahead and not self._masks_are_due:
            return None  # the ranks insert drafts themselves
        drafts, self._drafts = self._drafts, None
        return super().take_draft_token_ids() if drafts is None else drafts.result()

    def _ask_for_drafts(self) -> None:
        """Asks the Verifier for drafts before the step's output is processed, which is when vLLM would ask.

        It then waits for the drafter meanwhile, and need not be woken once more.
        """
        if self._asks_for_drafts_early:
            self._drafts = self.collective_rpc(
                "take_draft_token_ids",
                timeout=envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS,
                unique_reply_rank=self.output_rank,
                non_block=True,
            )

    def _build_runtime_env(self) -> dict:
        runtime_env = super()._build_runtime_env()
        runtime_env.setdefault("env_vars", {}).update(self._placement.env_vars)
        return runtime_env

    @staticmethod
    def _get_actor_resource_kwargs() -> dict[str, Any]:
        return {} if current_platform.is_cpu() else RayExecutorV2._get_actor_resource_kwargs()

    def _connect(self, parallel_config: Any, **_: Any) -> None:
        if not ray.is_initialized():
            ray.init(address=self._placement.ray_address, namespace=NAMESPACE, log_to_driver=False)
        if parallel_config.placement_group is None:
            raise RuntimeError("RayRanksExecutor needs parallel_config.placement_group")

    def _bundles_by_rank(self, group: Any) -> list[tuple[int, str, str]]:
        """Returns bundle, node id and node address of each rank. vLLM's look-up refuses ranks that share a bundle."""
        node_of = placement_group_table(group)["bundles_to_node_id"]
        address_of = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
        return [(index, node_of[index], address_of[node_of[index]]) for index in self._placement.bundle_indices]

    @contextmanager
    def _replace_vllm_names(self) -> Iterator[None]:
        """Replaces names in the module of ``_init_executor`` while it runs."""
        placement = self._placement
        ours = {
            "initialize_ray_cluster": self._connect,
            "get_bundles_sorted_by_node": self._bundles_by_rank,
            "build_actor_name": lambda instance_id, rank, *sizes: placement.actor_names[rank],
            "RayWorkerProc": RankProc,
        }
        stock = {name: getattr(ray_executor_v2, name) for name in ours}
        try:
            for name, value in ours.items():
                setattr(ray_executor_v2, name, value)
            yield
        finally:
            for name, value in stock.items():
                setattr(ray_executor_v2, name, value)


def sleep_early(queue: Any) -> None:
    """Makes the reader of a vLLM message queue wait for its notification rather than spin, on a CPU."""
    if current_platform.is_cpu() and queue is not None:
        condition = queue._spin_condition  # None without a reader on this node
        if condition is not None and condition.is_reader:
            condition.busy_loop_s = _CPU_SPIN_S
            shm_broadcast.SHM_READER_RECHECK_INTERVAL_MS = _CPU_RECHECK_MS
