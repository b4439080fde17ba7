"""Checks that the installed vLLM has every method that ours override, with the parameters we count on.

vLLM is pinned to one minor version. This test is what says which names have moved when the pin does.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.executor.ray_executor_v2 import RayExecutorV2, RayWorkerProc
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.structured_output import StructuredOutputManager

from outrider.actors.vllm_adapter import (
    async_drafts,
    executor,
    input_parameters,
    pipeline_stages,
    scheduler,
    structured_outputs,
    target_engine,
    updatable_llm,
)
from outrider.actors.vllm_adapter.engine_args import worker_class


def overrides() -> Iterator[tuple[type, type]]:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from outrider.actors.vllm_adapter.target_runner import RoundRunner
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
    yield input_parameters.ParameterProcessor, InputProcessor
    yield updatable_llm.UpdatableLLM, AsyncLLM
    yield target_engine.EngineLoad, StatLoggerBase
    yield RoundRunner, GPUModelRunner
    yield TargetWorker, worker_class()


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
