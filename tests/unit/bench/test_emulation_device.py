"""The device's timeline: enqueued work runs in order, and only reads wait."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from tests.bench.emulation.device import Device, install_reads
from tests.bench.emulation.trace import TraceWriter

EXECUTOR = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=False))


class Host:
    """A clock that goes on when somebody works or waits."""

    def __init__(self) -> None:
        self.now = 10.0

    def clock(self) -> float:
        return self.now

    def wait(self, until: float, polls: bool) -> None:
        self.now = max(self.now, until)


@pytest.fixture
def host() -> Host:
    return Host()


@pytest.fixture
def device(host: Host) -> Device:
    return Device(host.clock, host.wait)


def enqueue(device: Device, seconds: float, trace: TraceWriter | None = None, tokens: int = 1) -> None:
    device.enqueue(device.now(), seconds, trace, np.arange(tokens), np.arange(tokens))


def test_what_is_enqueued_behind_work_begins_after_it(host: Host, device: Device) -> None:
    enqueue(device, 0.025)
    device.has_results()
    for _ in range(3):
        host.now += 0.001
        enqueue(device, 0.006)
        device.has_results()
    device.read()  # of the target's tokens: its copy stands behind the drafts
    assert host.now == pytest.approx(10.043)


def test_vllm_reads_where_it_makes_values_of_results(
    host: Host, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.executor.uniproc_executor import UniProcExecutor
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    called: list[tuple[str, float]] = []

    def launch(executor: object, method: str) -> str:
        enqueue(device, 0.01)
        device.has_results()
        called.append((method, host.now))
        return method

    # In the real classes, so that the names are vLLM's; monkeypatch takes the wrappers away again.
    monkeypatch.setattr(GPUModelRunner, "_bookkeeping_sync", lambda runner: called.append(("tokens", host.now)))
    monkeypatch.setattr(UniProcExecutor, "collective_rpc", launch)
    for _ in range(2):  # the second time changes nothing
        install_reads(device)

    rpc, bookkeeping = UniProcExecutor.collective_rpc, GPUModelRunner._bookkeeping_sync
    assert rpc(EXECUTOR, "execute_model") == "execute_model"
    assert host.now == 10.0
    bookkeeping(SimpleNamespace(use_async_scheduling=False))
    assert rpc(EXECUTOR, "draft") == "draft"
    assert called == [("execute_model", 10.0), ("tokens", pytest.approx(10.01)), ("draft", pytest.approx(10.01))]
    assert host.now == pytest.approx(10.02)
    assert device.step == 2


def test_vllm_reads_a_step_that_it_scheduled_ahead_when_its_output_is_asked_for(
    host: Host, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.worker.gpu_model_runner import AsyncGPUModelRunnerOutput, GPUModelRunner

    monkeypatch.setattr(GPUModelRunner, "_bookkeeping_sync", lambda runner: None)
    monkeypatch.setattr(AsyncGPUModelRunnerOutput, "__init__", lambda output: None)
    monkeypatch.setattr(AsyncGPUModelRunnerOutput, "get_output", lambda output: host.now)
    install_reads(device)

    def launch(seconds: float) -> AsyncGPUModelRunnerOutput:
        enqueue(device, seconds)
        device.has_results()
        GPUModelRunner._bookkeeping_sync(SimpleNamespace(use_async_scheduling=True))
        return AsyncGPUModelRunnerOutput()

    first, second = launch(0.025), launch(0.025)
    assert host.now == 10.0, "the host has launched both"
    assert first.get_output() == pytest.approx(10.025), "what was enqueued after a copy is not waited for"
    assert second.get_output() == pytest.approx(10.050)
    assert device.step == 2
