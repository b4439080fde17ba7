"""What a rank of the target does when its device is there."""

from types import SimpleNamespace

from outrider.actors.vllm_adapter import target_worker
from outrider.actors.vllm_adapter.target_worker import TargetWorker
from outrider.cluster.config import parse_config


class Runner:
    """vLLM's."""


def test_the_group_s_communicator_is_made_before_memory_is_profiled(monkeypatch):
    events = []
    group = SimpleNamespace(world_size=2, mq_broadcaster=None, broadcast=lambda sent: events.append(sent.device.type))
    monkeypatch.setattr(target_worker, "get_tp_group", lambda: group)
    monkeypatch.setattr(TargetWorker.__base__, "init_device", lambda self: events.append("device"))
    config = parse_config({"target": {"model": "t", "tensor_parallel_size": 2}})
    worker = object.__new__(TargetWorker)
    worker.rank, worker.device, worker.model_runner = 1, "cpu", Runner()
    worker.vllm_config = SimpleNamespace(
        additional_config={"outrider": config.model_dump(mode="json")}, speculative_config=None
    )
    worker.scheduler_config = SimpleNamespace(async_scheduling=False)
    worker.init_device()
    assert events == ["device", "cpu"]
