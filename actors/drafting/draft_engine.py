"""The draft model's engine: vLLM's EngineCore driven by hand, its KV blocks from vLLM's own KVCacheManager."""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.request import Request, RequestStatus

from actors.drafting.draft_plan import Drafted, DraftPlan
from cluster.config import ConfigError


class DraftEngine:
    """Loads the model at construction (tens of seconds). Not thread-safe: the drafter's loop owns it."""

    def __init__(self, vllm_config: VllmConfig, in_process: bool) -> None:
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            current_platform.register_triton_kernel_overrides()
        executor = UniProcExecutor if in_process else Executor.get_class(vllm_config)
        self._core = EngineCore(vllm_config, executor, log_stats=False)
        self._kv = self._core.scheduler.kv_cache_manager
        if self._core.scheduler.kv_cache_config.needs_kv_cache_zeroing:
            raise ConfigError(
                "drafter.model: has recurrent or mixed-precision layers, whose state cannot be rolled back after a "
                "rejected draft; use a draft model with attention layers only"
            )
        self._requests: dict[str, Request] = {}
        self._unallocated: set[str] = set()
        self.max_model_len: int = vllm_config.model_config.max_model_len
        self.vocab_size: int = vllm_config.model_config.get_vocab_size()
        self.max_num_seqs: int = vllm_config.scheduler_config.max_num_seqs
        self.max_num_batched_tokens: int = vllm_config.scheduler_config.max_num_batched_tokens

    def start(self, request_id: str, token_ids: list[int]) -> int:
        """Register a sequence and adopt what the prefix cache holds of it. Returns how many leading tokens that is."""
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(token_ids),
            sampling_params=SamplingParams(temperature=0.0, max_tokens=1),
            pooling_params=None,
            block_hasher=self._core.request_block_hasher,
        )
        self._requests[request_id] = request
        self._unallocated.add(request_id)
        blocks, num_computed, _ = self._kv.get_computed_blocks(request)
        if num_computed == 0:
            return 0
        # Adopted at once: a hit holds no reference, and the first chunk may be many rounds away.
        adopted = self._kv.allocate_slots(request, 0, num_new_computed_tokens=num_computed, new_computed_blocks=blocks)
        return 0 if adopted is None else num_computed

    def append(self, request_id: str, token_ids: list[int]) -> None:
        self._requests[request_id].append_output_token_ids(token_ids)

    def allocate(
        self, request_id: str, num_computed: int, num_new: int, num_lookahead: int
    ) -> tuple[list[int], ...] | None:
        """KV blocks for num_new committed tokens and num_lookahead drafts after num_computed valid ones.

        Returns the block ids to append, one list per KV cache group; on a sequence's first call all it has. None when
        out of KV.
        """
        request = self._requests[request_id]
        request.num_computed_tokens = num_computed
        blocks = self._kv.allocate_slots(request, num_new, num_lookahead_tokens=num_lookahead)
        if blocks is None:
            return None
        request.status = RequestStatus.RUNNING
        if request_id in self._unallocated:
            self._unallocated.discard(request_id)
            return self._kv.get_block_ids(request_id)
        return blocks.get_block_ids()

    def finish(self, request_id: str) -> None:
        """Free a sequence's blocks; full ones stay in the prefix cache until they are needed."""
        self._unallocated.discard(request_id)
        self._kv.free(self._requests.pop(request_id))

    def run(self, plan: DraftPlan) -> dict[str, Drafted]:
        """Execute a plan on every rank. Returns request_id -> what rank 0 drafted, for rows with num_drafts."""
        result: list[Any] = self._core.model_executor.collective_rpc("draft", args=(plan,))
        return result[0]

    @property
    def kv_cache_usage(self) -> float:
        return self._kv.usage

    def shutdown(self) -> None:
        self._core.shutdown()
