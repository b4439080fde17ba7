"""Runs the draft model on vLLM's EngineCore and KVCacheManager, without vLLM's scheduler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.request import Request, RequestStatus

from outrider.actors.drafter.engine import Drawn, StepPlan
from outrider.actors.vllm_adapter.error_text import last_line
from outrider.cluster.config import ConfigError
from outrider.cluster.link.messages import DraftSampling
from outrider.cluster.vocabulary import mask_token


class DraftEngine:
    """Implements `drafter.engine.Engine` on vLLM.

    Construction loads the model (tens of seconds). The draft loop's lock guards the KV cache manager. The loop's thread
    calls `run` and `load_weights` without the lock, since neither uses the manager.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        in_process: bool,
        adapters: Sequence[str] = (),
        parallel_drafting: bool | None = False,
    ) -> None:
        """Loads the model. Raises ConfigError for a model that cannot draft.

        in_process: runs the model in this process rather than in rank actors.
        adapters: directories of LoRA adapters; rows name them by number, from 1.
        parallel_drafting: as drafter.parallel_drafting.
        """
        from vllm.platforms import current_platform

        if vllm_config.model_config.uses_mrope:
            raise ConfigError("drafter.model: has multi-dimensional positions (M-RoPE); use a text-only draft model")
        if vllm_config.model_config.supports_multimodal_inputs:
            raise ConfigError("drafter.model: vLLM does not run it on text alone; use a text-only draft model")
        if current_platform.is_cpu():
            current_platform.register_triton_kernel_overrides()
        executor = UniProcExecutor if in_process else Executor.get_class(vllm_config)
        self._core = EngineCore(vllm_config, executor, log_stats=False)
        self._kv = self._core.scheduler.kv_cache_manager
        kv_cache_config = self._core.scheduler.kv_cache_config
        if kv_cache_config.needs_kv_cache_zeroing:
            raise ConfigError(
                "drafter.model: has recurrent or mixed-precision layers, whose state cannot be rolled back after a "
                "rejected draft; use a draft model with attention layers only"
            )
        self._requests: dict[str, Request] = {}
        self._taken: dict[int, KVCacheBlock] = {}
        self._weights_changes = 0
        self.block_sizes = tuple(int(group.kv_cache_spec.block_size) for group in kv_cache_config.kv_cache_groups)
        self.max_model_len: int = vllm_config.model_config.max_model_len
        self.vocab_size: int = vllm_config.model_config.get_vocab_size()
        self.max_num_batched_tokens: int = vllm_config.scheduler_config.max_num_batched_tokens

        self.end_token_ids = _end_token_ids(vllm_config)
        if adapters:
            try:
                self._core.model_executor.collective_rpc("load_adapters", args=(list(adapters),))
            except Exception as error:
                raise ConfigError(f"drafter.lora_modules: vLLM does not take one: {last_line(error)}") from error

        mask_id = mask_token(vllm_config.model_config.hf_config.to_dict(), parallel_drafting)
        self.one_pass = mask_id is not None
        if mask_id is not None:
            if not 0 <= mask_id < self.vocab_size:
                raise ConfigError(f"drafter.model: has no token {mask_id}, its mask; set parallel_drafting: false")
            self._core.model_executor.collective_rpc("set_mask", args=(mask_id,))

    def cut_head(self, token_ids: list[int]) -> None:
        """Cuts the output head to these tokens, from the next step on. Raises ConfigError where that is impossible."""
        self._core.model_executor.collective_rpc("cut_head", args=(token_ids,))

    def _cache_salt(self, sampling: DraftSampling) -> str | None:
        """Returns what keeps KV blocks of tenants, adapters and versions of the weights apart."""
        of = sampling.tenant, sampling.adapter, self._weights_changes
        return "/".join(map(str, of)) if any(of) else None

    def load_weights(self, tensors: Mapping[str, Any]) -> None:
        self._core.model_executor.collective_rpc("load_weights_of_version", args=(dict(tensors),))
        self._weights_changes += 1

    def start(self, request_id: str, token_ids: list[int], sampling: DraftSampling) -> int:
        """See Engine. Hashing a sequence's blocks takes 0.2 us a token."""
        self._requests[request_id] = request = Request(
            request_id=request_id,
            prompt_token_ids=list(token_ids),
            sampling_params=SamplingParams(temperature=0.0, max_tokens=1),
            pooling_params=None,
            block_hasher=self._core.request_block_hasher,
            cache_salt=self._cache_salt(sampling),
        )
        blocks, num_computed, _ = self._kv.get_computed_blocks(request)
        if num_computed == 0:
            return 0
        # A hit holds no reference, and the first chunk may be many rounds away.
        adopted = self._kv.allocate_slots(request, 0, num_new_computed_tokens=num_computed, new_computed_blocks=blocks)
        return 0 if adopted is None else num_computed

    def append(self, request_id: str, token_ids: list[int]) -> None:
        self._requests[request_id].append_output_token_ids(token_ids)

    def allocate(self, request_id: str, num_computed: int, num_new: int, num_lookahead: int) -> bool:
        request = self._requests[request_id]
        request.num_computed_tokens = num_computed
        if self._kv.allocate_slots(request, num_new, num_lookahead_tokens=num_lookahead) is None:
            return False
        request.status = RequestStatus.RUNNING
        return True

    def give_back(self, request_id: str) -> None:
        request = self._requests[request_id]
        self._kv.free(request)
        request.num_computed_tokens = 0

    def missing(self, request_id: str) -> int:
        request, kv = self._requests[request_id], self._kv
        needed: int = kv.coordinator.get_num_blocks_to_allocate(
            request_id=request_id,
            num_tokens=request.num_tokens,
            new_computed_blocks=kv.empty_kv_cache_blocks.blocks,
            num_encoder_tokens=0,
            total_computed_tokens=request.num_computed_tokens,
            num_local_computed_tokens=request.num_computed_tokens,
            num_tokens_main_model=request.num_tokens,
            apply_admission_cap=True,  # a sliding window holds no more than itself and a chunk
        )
        return needed

    @property
    def num_free_blocks(self) -> int:
        free: int = self._kv.block_pool.get_num_free_blocks()
        return free

    def block_ids(self, request_id: str) -> tuple[list[int], ...]:
        ids: tuple[list[int], ...] = self._kv.get_block_ids(request_id)
        return ids

    def take_blocks(self, count: int) -> list[int] | None:
        pool = self._kv.block_pool
        if count > self.num_free_blocks:
            return None
        blocks = pool.get_new_blocks(count)
        self._taken.update((block.block_id, block) for block in blocks)
        return [block.block_id for block in blocks]

    def free_blocks(self, block_ids: list[int]) -> None:
        self._kv.block_pool.free_blocks([self._taken.pop(block_id) for block_id in block_ids])

    def finish(self, request_id: str) -> None:
        """Frees a sequence's blocks; full ones stay in the prefix cache until they are needed."""
        self._kv.free(self._requests.pop(request_id))

    def run(self, plan: StepPlan) -> list[list[Drawn]]:
        results: list[Any] = self._core.model_executor.collective_rpc("draft", args=(plan,))
        drawn: list[list[Drawn]] = results[0]
        return drawn

    @property
    def kv_cache_usage(self) -> float:
        return self._kv.usage


def _end_token_ids(vllm_config: VllmConfig) -> list[int]:
    """Returns the ids that end an answer, as the checkpoint says."""
    model_config = vllm_config.model_config
    named = [
        getattr(model_config.hf_text_config, "eos_token_id", None),
        model_config.try_get_generation_config().get("eos_token_id"),
    ]
    ids = {token for entry in named for token in (entry if isinstance(entry, list) else [entry])}
    return sorted(token for token in ids if isinstance(token, int) and 0 <= token < model_config.get_vocab_size())
