"""The installed vLLM has every name that we lean on; one that lacks a name is refused by it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.executor.ray_executor_v2 import RayExecutorV2, RayWorkerProc
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.structured_output import StructuredOutputManager

from outrider.actors.vllm_seam import ahead, executor, leans_on, scheduler, stages, structured_outputs, target_engine
from outrider.actors.vllm_seam.engine_args import worker_class
from outrider.cluster.borrowed import Table
from outrider.cluster.config import ConfigError

BY_USER = {table.used_by: table for table in leans_on.TABLES}


@pytest.mark.parametrize("table", leans_on.TABLES, ids=lambda table: table.used_by)
def test_every_name_is_there(table: Table):
    worker_class()  # which decides how vLLM's workers may be imported
    assert table.problems() == []


def test_the_versions_are_those_of_the_tables():
    assert leans_on.PROJECT.installed.startswith(leans_on.PROJECT.written_for)


def listed() -> set[str]:
    names = [name for table in leans_on.TABLES for borrowed in table.names for name in borrowed.names()]
    return {name.replace(":", ".").rpartition(".")[2] for name in names}


def test_what_is_overridden_is_listed():
    from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from outrider.actors.vllm_seam.target_runner import RoundRunner
    from outrider.actors.vllm_seam.target_sampler import _MinTokens
    from outrider.actors.vllm_seam.target_worker import TargetWorker

    for ours, theirs in (
        (executor.RankProc, RayWorkerProc),
        (executor.RayRanksExecutor, RayExecutorV2),
        (scheduler.FairScheduling, Scheduler),
        (scheduler.RoundScheduling, Scheduler),
        (structured_outputs.TwoBackends, StructuredOutputManager),
        (ahead.DraftSlots, AsyncScheduler),
        (ahead.AheadVllmConfig, VllmConfig),
        (stages.StagedScheduling, Scheduler),
        (stages.StagedVllmConfig, VllmConfig),
        (target_engine.RoundOutputProcessor, OutputProcessor),
        (target_engine._Recorder, StatLoggerBase),
        (RoundRunner, GPUModelRunner),
        (TargetWorker, worker_class()),
        (_MinTokens, MinTokensLogitsProcessor),
    ):
        overridden = {name for name in vars(ours) if hasattr(theirs, name) and not name.startswith("__")}
        assert overridden, f"{ours.__name__} overrides nothing of {theirs.__name__}'s"
        assert overridden - {"_abc_impl"} <= listed()


def rename(monkeypatch, owner, old, new):
    monkeypatch.setattr(owner, new, getattr(owner, old), raising=False)
    monkeypatch.delattr(owner, old)


def test_a_renamed_method_is_refused_by_its_name(monkeypatch):
    rename(monkeypatch, RayExecutorV2, "_build_runtime_env", "_make_runtime_env")
    with pytest.raises(ConfigError) as refused:
        leans_on.EXECUTOR.check()
    said = str(refused.value)
    assert "vllm.v1.executor.ray_executor_v2.RayExecutorV2._build_runtime_env does not exist" in said
    assert leans_on.PROJECT.installed in said
    assert "written for 0.32" in said


def test_an_attribute_that_no_constructor_assigns_is_refused_by_its_name(monkeypatch):
    """What used to be taken silently: the queue that has no condition of this name any more."""
    from vllm.distributed.device_communicators import shm_broadcast

    class Renamed:
        class ReadTimeoutWithWarnings(shm_broadcast.MessageQueue.ReadTimeoutWithWarnings): ...

        def __init__(self):
            self._condition = None

        def acquire_read(self):
            return self._condition

    monkeypatch.setattr(shm_broadcast, "MessageQueue", Renamed)
    assert leans_on.EXECUTOR.problems() == [
        "vllm.distributed.device_communicators.shm_broadcast.MessageQueue._spin_condition does not exist"
    ]


def test_a_global_that_is_no_longer_looked_up_is_refused(monkeypatch):
    def build_executor(self):
        """Takes its helpers from elsewhere."""

    monkeypatch.setattr(RayExecutorV2, "_init_executor", build_executor)
    unread = [problem.rpartition(" no longer looks up ")[2] for problem in leans_on.EXECUTOR.problems()]
    for name in ("initialize_ray_cluster", "get_bundles_sorted_by_node", "build_actor_name", "RayWorkerProc"):
        assert f"vllm.v1.executor.ray_executor_v2.{name}" in unread


def test_a_method_that_takes_other_parameters_is_refused(monkeypatch):
    monkeypatch.setattr(Scheduler, "update_from_output", lambda self, scheduler_output, output, spare: None)
    (problem, _) = leans_on.SCHEDULER.problems()
    assert problem == (
        "vllm.v1.core.sched.scheduler.Scheduler.update_from_output takes (scheduler_output, output, spare) in place of "
        "(scheduler_output, model_runner_output)"
    )


LOADED_AND_CHECKED = """
import importlib, sys
from outrider.actors.vllm_seam import leans_on
for module, table in (("target_worker", "TARGET_RANK"), ("draft_worker", "DRAFT_RANK"), ("target_engine", "REPLICA")):
    importlib.import_module(f"outrider.actors.vllm_seam.{module}")
    if module != "target_engine":
        import vllm.v1.worker.gpu_model_runner  # comes with a worker's init_device
    before = set(sys.modules)
    getattr(leans_on, table).check()
    print(table, sorted(name for name in set(sys.modules) - before if name.startswith("vllm")))
"""


def test_a_check_imports_nothing_that_its_process_has_not():
    done = subprocess.run([sys.executable, "-c", LOADED_AND_CHECKED], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-3:] == ["TARGET_RANK []", "DRAFT_RANK []", "REPLICA []"]
