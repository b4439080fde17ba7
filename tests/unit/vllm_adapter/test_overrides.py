"""The installed vLLM and torch have every name that is overridden, replaced or set, with the parameters we count on.

vLLM is pinned to one minor version. This test is what says which names have moved when the pin does.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.executor.ray_executor_v2 import RayExecutorV2, RayWorkerProc
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.structured_output import StructuredOutputManager

from outrider.actors.vllm_adapter import (
    async_drafts,
    executor,
    pipeline_stages,
    scheduler,
    structured_outputs,
    target_engine,
)
from outrider.actors.vllm_adapter.engine_args import worker_class

REPLACED = {
    # by the executor, while RayExecutorV2._init_executor runs
    "vllm.v1.executor.ray_executor_v2:initialize_ray_cluster": ("parallel_config",),
    "vllm.v1.executor.ray_executor_v2:get_bundles_sorted_by_node": (),
    "vllm.v1.executor.ray_executor_v2:build_actor_name": ("instance_id", "rank"),
    "vllm.v1.executor.ray_executor_v2:RayWorkerProc": ("vllm_config", "rank"),
    "vllm.distributed.device_communicators.shm_broadcast:SpinCondition.wait": (),
    "vllm.distributed.device_communicators.shm_broadcast:SHM_READER_RECHECK_INTERVAL_MS": None,
    # by the worker
    "vllm.lora.punica_wrapper.punica_base:PunicaWrapperBase.add_lora_linear": (),
    "vllm.lora.punica_wrapper.punica_base:PunicaWrapperBase.add_lora_logits": (),
    # made by hand
    "vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots": (
        "request", "num_new_tokens", "num_new_computed_tokens", "new_computed_blocks", "num_lookahead_tokens",
    ),
    "vllm.v1.core.kv_cache_manager:KVCacheManager.get_computed_blocks": ("request",),
    "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.get_num_blocks_to_allocate": (
        "request_id", "num_tokens", "new_computed_blocks", "num_encoder_tokens", "total_computed_tokens",
        "num_local_computed_tokens", "num_tokens_main_model", "apply_admission_cap",
    ),
    "vllm.v1.attention.backend:CommonAttentionMetadata": (
        "query_start_loc", "query_start_loc_cpu", "seq_lens", "num_reqs", "num_actual_tokens", "max_query_len",
        "max_seq_len", "block_table_tensor", "slot_mapping",
    ),
    "vllm.forward_context:set_forward_context": ("attn_metadata", "vllm_config", "num_tokens", "slot_mapping"),
    "vllm.v1.outputs:SamplerOutput": ("sampled_token_ids", "logprobs_tensors"),
    "vllm.v1.outputs:LogprobsTensors": ("logprob_token_ids", "logprobs", "selected_token_ranks"),
    "vllm.v1.outputs:DraftTokenIds": ("req_ids", "draft_token_ids"),
    "vllm.v1.sample.sampler:Sampler.apply_logits_processors": ("logits", "sampling_metadata", "predict_bonus_token"),
    "vllm.v1.sample.sampler:Sampler.gather_logprobs": ("logprobs", "num_logprobs", "token_ids"),
    "vllm.v1.sample.logits_processor.interface:BatchUpdate": ("batch_size", "removed", "added", "moved"),
    "torch.distributed:Backend._plugins": None,
}  # fmt: skip
"""Functions and classes that are replaced, called or made with vLLM's private interface, by the parameters that are
counted on. None: something that is set."""


def overrides() -> Iterator[tuple[type, type]]:
    from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from outrider.actors.vllm_adapter.target_runner import RoundRunner
    from outrider.actors.vllm_adapter.target_sampler import _MinTokens
    from outrider.actors.vllm_adapter.target_worker import TargetWorker

    yield executor.RankProc, RayWorkerProc
    yield executor.RayRanksExecutor, RayExecutorV2
    yield scheduler.FairScheduling, Scheduler
    yield scheduler.RoundScheduling, Scheduler
    yield structured_outputs.TwoBackends, StructuredOutputManager
    yield async_drafts.AsyncDraftScheduler, AsyncScheduler
    yield async_drafts.AsyncDraftVllmConfig, VllmConfig
    yield pipeline_stages.StagedScheduling, Scheduler
    yield pipeline_stages.StagedVllmConfig, VllmConfig
    yield target_engine.RoundOutputProcessor, OutputProcessor
    yield target_engine._Recorder, StatLoggerBase
    yield RoundRunner, GPUModelRunner
    yield TargetWorker, worker_class()
    yield _MinTokens, MinTokensLogitsProcessor


def found(name: str) -> Any:
    module, _, path = name.partition(":")
    value: Any = importlib.import_module(module)
    for part in path.split("."):
        value = getattr(value, part)
    return value


def missing_parameters(ours: Any, theirs: Any) -> set[str]:
    """Parameters of theirs that ours cannot be called with."""
    mine = inspect.signature(ours).parameters.values()
    if any(each.kind is each.VAR_KEYWORD for each in mine):
        return set()
    names = {each.name for each in mine}
    takes_rest = any(each.kind is each.VAR_POSITIONAL for each in mine)
    return {
        name
        for name, each in inspect.signature(theirs).parameters.items()
        if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
        and name not in names
        and not (takes_rest and each.kind is not each.KEYWORD_ONLY)
    }


def test_methods_override_methods_that_vllm_has_and_take_its_parameters():
    worker_class()  # which decides how vLLM's workers may be imported
    wrong, seen = [], 0
    for ours, theirs in overrides():
        shared = [name for name in vars(ours) if hasattr(theirs, name) and not name.startswith("__")]
        assert shared, f"{ours.__name__} overrides nothing of {theirs.__name__}'s"
        for name in shared:
            if inspect.isfunction(mine := inspect.getattr_static(ours, name)):
                seen += 1
                if lacking := missing_parameters(mine, getattr(theirs, name)):
                    wrong.append(f"{ours.__name__}.{name} does not take {sorted(lacking)}")
    assert wrong == []
    assert seen > 30


@pytest.mark.parametrize("name", REPLACED)
def test_what_is_replaced_or_called_is_there_with_its_parameters(name: str):
    value, parameters = found(name), REPLACED[name]
    if parameters:
        taken = inspect.signature(value).parameters
        assert [each for each in parameters if each not in taken] == []


def test_an_override_that_lacks_a_parameter_is_told():
    class Ours:
        def update_from_output(self, scheduler_output): ...

    lacking = missing_parameters(Ours.update_from_output, Scheduler.update_from_output)
    assert lacking == {"model_runner_output"}
