"""An emulated accelerator as its host meets it: work is enqueued in order and takes its time, only reading waits.

A forward pass is enqueued and returns at once, and the host goes on: it launches the sampler, prepares what comes next,
or enqueues another forward pass. The device begins a piece of work when it is free and the host has asked for it, and
is busy for the emulated time. Whoever turns results into values on the host waits until the device has done all that
was enqueued before, as a copy on its one stream would.

One device a process: models that share a process share their accelerators, as vLLM's in-process drafter does.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.bench.emulation.step_time import wait_until
from tests.bench.emulation.trace import TraceWriter


@dataclass(slots=True)
class _Forward:
    """Enqueued and not yet read behind. Times: seconds of the device's clock."""

    trace: TraceWriter | None
    called_s: float
    started_s: float
    ended_s: float
    token_ids: np.ndarray
    positions: np.ndarray
    logits_s: float = math.nan


@dataclass(frozen=True, slots=True)
class Copy:
    """To the host, behind everything that was enqueued before it. step: which of the device's."""

    step: int
    ends_s: float
    forwards: tuple[_Forward, ...]


class Device:
    """One thread of a process runs its models. Where its host runs ahead, another one waits for their copies."""

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        wait: Callable[[float], None] = wait_until,
    ) -> None:
        """wait: called with the time to wait for."""
        self._clock, self._wait = clock, wait
        self._pending: list[_Forward] = []
        self._has_results = False
        self.free_at = 0.0
        """When everything enqueued so far is done."""

        self.step = 0
        """Copies so far: everything enqueued between two of them is one step."""

    def now(self) -> float:
        return self._clock()

    def enqueue(
        self,
        called_s: float,
        duration_s: float,
        trace: TraceWriter | None,
        token_ids: np.ndarray,
        positions: np.ndarray,
    ) -> None:
        """A forward pass. called_s: when its host began to launch it. token_ids, positions: int [tokens]."""
        started = max(called_s, self.free_at)
        self.free_at = started + duration_s
        self._pending.append(_Forward(trace, called_s, started, self.free_at, token_ids, positions))

    def has_results(self) -> None:
        """Logits of the last forward pass are asked for: the next read is of them, or of what follows from them."""
        self._has_results = True
        if self._pending:
            self._pending[-1].logits_s = self._clock()

    def read(self) -> None:
        """Copy to the host, and wait for it."""
        self.wait_for(self.copy())

    def copy(self) -> Copy | None:
        """Enqueue one. None when there is nothing to read: a prefill that is not sampled from is waited for by
        nobody."""
        if not self._has_results:
            return None
        self._has_results = False
        copy = Copy(self.step, self.free_at, tuple(self._pending))
        self._pending.clear()
        self.step += 1
        return copy

    def wait_for(self, copy: Copy | None) -> None:
        if copy is None:
            return
        came = self._clock()
        self._wait(copy.ends_s)
        went_on = self._clock()
        for forward in copy.forwards:
            if forward.trace is not None:
                times = (forward.called_s, forward.logits_s, forward.started_s, forward.ended_s, came, went_on)
                forward.trace.add(copy.step, times, forward.token_ids, forward.positions)
        for trace in {id(f.trace): f.trace for f in copy.forwards if f.trace is not None}.values():
            trace.flush()


DEVICE = Device()
"""This process's."""


def install_reads(device: Device = DEVICE) -> None:
    """Make vLLM's reads of results wait. Again is harmless. Raises RuntimeError when a place is not where vLLM 0.32 has
    it.

    - ``GPUModelRunner._bookkeeping_sync`` makes lists of the sampled tokens: the one copy to the host of a step, ours
      and vLLM's alike. In-process drafts are enqueued before it, and on a GPU its copy stands behind them too.
    - Where vLLM schedules asynchronously the copy is enqueued there, and ``AsyncGPUModelRunnerOutput.get_output`` waits
      for it, in a thread of its own.
    - What ``UniProcExecutor.collective_rpc`` returns is values, but for ``execute_model``, which leaves its logits on
      the device: a step of a drafter on its own accelerator ends there.
    """
    from vllm.v1.executor.uniproc_executor import UniProcExecutor
    from vllm.v1.worker.gpu_model_runner import AsyncGPUModelRunnerOutput, GPUModelRunner

    for owner, name, wrap in (
        (GPUModelRunner, "_bookkeeping_sync", _reading_first),
        (AsyncGPUModelRunnerOutput, "__init__", _copying),
        (AsyncGPUModelRunnerOutput, "get_output", _waiting),
        (UniProcExecutor, "collective_rpc", _reading_last),
    ):
        inner = vars(owner).get(name)
        if inner is None:
            raise RuntimeError(f"{owner.__name__}.{name}: not there; the emulation's reads were written for vLLM 0.32")
        if not hasattr(inner, "waits_for_device"):
            outer: Any = functools.wraps(inner)(wrap(inner, device))
            outer.waits_for_device = True
            setattr(owner, name, outer)


def _reading_first(inner: Callable[..., Any], device: Device) -> Any:
    def bookkeeping(runner: Any, *args: Any, **kwargs: Any) -> Any:
        if not runner.use_async_scheduling:
            device.read()
        return inner(runner, *args, **kwargs)

    return bookkeeping


def _copying(inner: Callable[..., Any], device: Device) -> Any:
    def init(output: Any, *args: Any, **kwargs: Any) -> None:
        output.copy_of_device = device.copy()
        inner(output, *args, **kwargs)

    return init


def _waiting(inner: Callable[..., Any], device: Device) -> Any:
    def get_output(output: Any) -> Any:
        device.wait_for(output.copy_of_device)
        return inner(output)

    return get_output


def _reading_last(inner: Callable[..., Any], device: Device) -> Any:
    def call(executor: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        result = inner(executor, method, *args, **kwargs)
        if method != "execute_model" and not executor.scheduler_config.async_scheduling:
            device.read()
        return result

    return call
