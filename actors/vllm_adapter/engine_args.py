"""Translates our configuration to vLLM's, by the platform that vLLM runs on."""

from __future__ import annotations

import copy
from importlib.util import find_spec
from typing import Any

from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.usage.usage_lib import UsageContext

from outrider.actors.vllm_adapter.answer_parsers import AUTO, answer_parsers
from outrider.actors.vllm_adapter.async_drafts import AsyncDraftVllmConfig
from outrider.actors.vllm_adapter.path_rows import num_path_rows
from outrider.actors.vllm_adapter.pipeline_stages import StagedVllmConfig
from outrider.cluster.config import ConfigError, DraftModelConfig, EngineConfig, OutriderConfig
from outrider.cluster.device_defaults import CPU_KV_CACHE_BYTES
from outrider.cluster.engine_args import REFUSED_ON_CPU, about
from outrider.cluster.placement import RankPlacement


def on_gpu() -> bool:
    """Returns whether vLLM runs on an accelerator rather than a CPU."""
    from vllm.platforms import current_platform

    return not current_platform.is_cpu()


def worker_class() -> type:
    """Returns vLLM's V1 worker for this platform. The CPU module cannot be imported on a GPU build."""
    if on_gpu():
        from vllm.v1.worker.gpu_worker import Worker

        return Worker
    from vllm.v1.worker.cpu_worker import CPUWorker

    return CPUWorker


CPU_DRAFTER_BLOCK_SIZE = 32
"""The smallest block that vLLM's CPU attention takes."""


def _common(config: EngineConfig) -> dict[str, Any]:
    """Returns the engine arguments that target and draft model share."""
    gpu = on_gpu()
    args: dict[str, Any] = {
        "model": config.model,
        "tensor_parallel_size": config.tensor_parallel_size,
        "dtype": config.dtype,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "kv_cache_memory_bytes": config.kv_cache_memory_bytes or (None if gpu else CPU_KV_CACHE_BYTES),
        "enable_prefix_caching": True,  # vLLM's default, but for some of its CPU platforms
        "enforce_eager": not gpu,  # compiling for CPU costs minutes for a few per cent
    }
    if config.max_num_batched_tokens is not None:
        args["max_num_batched_tokens"] = config.max_num_batched_tokens
    for name in REFUSED_ON_CPU.keys() & config.engine_args.keys() if not gpu else ():
        raise ConfigError(f"{config.side}.engine_args.{name}: {REFUSED_ON_CPU[name]}")
    return args | copy.deepcopy(config.engine_args)


def target_vllm_config(config: OutriderConfig, ranks: RankPlacement, placement_group: Any) -> VllmConfig:
    """Returns the configuration of the target's engine, on our executor.

    With a drafter of ours or none, our worker chooses the tokens, so a seed gives the same answer with a drafter and
    without. With co-located drafting, worker, sampler and proposer are vLLM's own.

    Raises ConfigError, naming the section, for what vLLM refuses.
    """
    from outrider.actors.vllm_adapter.executor import RayRanksExecutor

    args = target_engine_arguments(config)
    args["distributed_executor_backend"] = RayRanksExecutor
    args["additional_config"] = {**ranks.as_additional_config(), "outrider": config.model_dump(mode="json")}
    vllm_config = _create(AsyncEngineArgs, args, placement_group, config.target)
    _check_pictures(config, vllm_config.model_config)
    if config.openai.reasoning_parser == AUTO:  # the family is known once the checkpoint has been read
        parsers = answer_parsers(config, vllm_config.model_config)
        if parsers.reasoning is not None:
            vllm_config.structured_outputs_config.reasoning_parser = parsers.reasoning
    if config.drafter is None and config.target.schedules_ahead:
        # Steps overlap as vLLM's own (overlap.py). vLLM's CPU platform clears this flag, but works with it.
        vllm_config.scheduler_config.async_scheduling = True
    kind = "Async" if vllm_config.scheduler_config.async_scheduling else ""
    if config.drafts_in_rounds and config.target.schedules_ahead:
        kind = "AsyncDraft"
        vllm_config.__class__ = AsyncDraftVllmConfig
    elif config.target.pipeline_parallel_size > 1:
        vllm_config.__class__ = StagedVllmConfig
    vllm_config.scheduler_config.scheduler_cls = f"outrider.actors.vllm_adapter.scheduler.{kind}RoundScheduler"
    return vllm_config


def target_engine_arguments(config: OutriderConfig) -> dict[str, Any]:
    """Returns vLLM's engine arguments for the target, except those of its ranks and those that need the checkpoint."""
    args = _common(config.target)
    if rows := num_path_rows(config):
        args.setdefault("max_num_active_seqs", config.target.max_num_seqs)
        args["max_num_seqs"] += rows
        if "max_num_batched_tokens" in args:  # vLLM refuses fewer tokens than requests
            args["max_num_batched_tokens"] = max(args["max_num_batched_tokens"], args["max_num_seqs"])
    args["pipeline_parallel_size"] = config.target.pipeline_parallel_size
    if config.target.serves_lora:
        args |= _lora_arguments(config.target.max_loras, config.target.max_lora_rank)
    args["limit_mm_per_prompt"] = config.target.media_limits
    args["allowed_media_domains"] = args.get("allowed_media_domains") or [NO_DOMAIN]
    args["disable_log_stats"] = False
    args["served_model_name"] = config.served_model_name  # metrics are labelled with it
    args["otlp_traces_endpoint"] = config.serving.otlp_traces_endpoint
    args["scheduling_policy"] = "priority"  # FairScheduling sets the priorities
    # vLLM chooses xgrammar for a request, or guidance where xgrammar lacks support; see TwoBackends.
    named = config.openai.reasoning_parser
    args["structured_outputs_config"] = {
        "backend": "auto",
        "reasoning_parser": "" if named in (None, AUTO) else named,
    }
    if config.drafter is not None:
        args["per_request_spec_decode_metrics"] = "summary"
    if config.co_located is not None:
        args["speculative_config"] = config.co_located.speculative_config(config.num_speculative_tokens)
        if not config.target.schedules_ahead:  # otherwise vLLM decides, since not every method supports it
            args["async_scheduling"] = False
        return args
    args["worker_cls"] = "outrider.actors.vllm_adapter.target_worker.TargetWorker"
    args["async_scheduling"] = False  # our own way replaces vLLM's, see async_drafts.py
    if config.drafter is not None:
        args["speculative_config"] = {
            "method": "custom_class",
            "model": "outrider.actors.vllm_adapter.target_worker.RemoteProposer",
            "num_speculative_tokens": config.num_speculative_tokens,
        }
    return args


NO_DOMAIN = "none.invalid"
"""An allowed domain that does not exist. Without any, vLLM fetches media from anywhere, the local network included."""


def _lora_arguments(num_adapters: int, max_lora_rank: int) -> dict[str, Any]:
    """Returns vLLM's LoRA arguments, with a slot for every adapter that may be loaded.

    With fewer slots, a request that is not scheduled for one step, as may happen near its last token, loses its
    adapter's slot to another, and the next step needs more slots than there are, which vLLM's scheduler asserts
    against.

    A CPU has one more slot, which stays empty: vLLM's CPU kernels apply the last slot's adapter to requests without
    one, where others in their batch have one.
    """
    slots = num_adapters + (0 if on_gpu() else 1)
    return {"enable_lora": True, "max_lora_rank": max_lora_rank, "max_loras": slots, "max_cpu_loras": slots}


def _check_pictures(config: OutriderConfig, model_config: Any) -> None:
    """Raises ConfigError where images are configured for a model that takes text alone."""
    if config.target.takes_pictures and not model_config.is_multimodal_model:
        named = f"target.engine_args.limit_mm_per_prompt: target.model ({model_config.architecture})"
        raise ConfigError(f"{named} takes text alone; leave it out")


def drafter_vllm_config(config: DraftModelConfig, ranks: RankPlacement | None, placement_group: Any) -> VllmConfig:
    """Returns the configuration of the draft model's engine. Without ranks it runs in the calling process."""
    args = _common(config)
    # vLLM sizes buffers and CUDA graphs by requests, and each row of the drafter counts as one. On a GPU vLLM captures
    # by default a FULL graph for one token per row, and PIECEWISE graphs for other steps.
    args["max_num_seqs"] = max(config.max_num_seqs, config.max_draft_rows)
    if not on_gpu():
        args.setdefault("block_size", CPU_DRAFTER_BLOCK_SIZE)
    args["worker_cls"] = "outrider.actors.vllm_adapter.draft_worker.DraftWorker"
    args["async_scheduling"] = False
    args["skip_tokenizer_init"] = True
    if config.lora_modules:
        args |= _lora_arguments(len(config.lora_modules), config.max_lora_rank)
    # Drafts are text. Otherwise a multimodal model is compiled and captured for embeddings instead of token ids, and
    # its other towers take memory.
    args["language_model_only"] = True
    if ranks is not None:
        from outrider.actors.vllm_adapter.executor import RayRanksExecutor

        args["distributed_executor_backend"] = RayRanksExecutor
        args["additional_config"] = ranks.as_additional_config()
    return _create(EngineArgs, args, placement_group, config)


_REFUSALS = (
    ValueError, OSError, TypeError, LookupError, AttributeError, NotImplementedError, AssertionError, ImportError,
)  # fmt: skip
"""The errors that vLLM raises for settings that do not fit together, or do not fit this machine."""


def _create(made_by: type[EngineArgs], args: dict[str, Any], placement_group: Any, config: EngineConfig) -> VllmConfig:
    """Makes vLLM's configuration of engine arguments. Raises ConfigError."""
    # vLLM chooses max_num_batched_tokens by the usage context; without one it is 2,048 on any GPU, with a warning.
    usage = UsageContext.OPENAI_API_SERVER if on_gpu() and config.side == "target" else None
    try:
        vllm_config = made_by(**args).create_engine_config(usage)
    except _REFUSALS as error:
        raise ConfigError(_refusal(error, config)) from error
    vllm_config.parallel_config.placement_group = placement_group
    return vllm_config


def _refusal(error: Exception, config: EngineConfig) -> str:
    """Returns vLLM's refusal, under the name of the engine argument that it is about where that is known."""
    text = _first_lines(error)
    if not isinstance(error, ValueError | OSError):  # the message alone would not say enough
        text = f"{type(error).__name__}: {text}"
    if "failed to be inspected" in text and find_spec("torchvision") is None:
        text += (
            " vLLM's code for many models that see pictures needs torchvision, which is not installed: install the "
            "build of it that is for this torch"
        )
    if (path := about(str(error), {config.side: config.engine_args})) is not None:
        return f"{path}: {text}"
    given = f" (with engine_args {', '.join(config.engine_args)})" if config.engine_args else ""
    return f"{config.side}: {text}{given}"


def _first_lines(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:4])
