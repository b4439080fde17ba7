"""The target engine's load, as its scheduler last reported it."""

from __future__ import annotations

from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase


class EngineLoad:
    """Running and waiting requests, KV usage and preemptions of one engine."""

    def __init__(self) -> None:
        self.running = self.waiting = 0
        self.kv_cache_usage = 0.0
        self.preemptions = 0

    def snapshot(self) -> dict[str, Any]:
        return {
            "running": self.running,
            "waiting": self.waiting,
            "kv_cache_usage": self.kv_cache_usage,
            "preemptions": self.preemptions,
        }

    def factory(self, vllm_config: Any, engine_index: int = 0) -> StatLoggerBase:
        """What AsyncLLM takes in stat_loggers."""
        return _Recorder(self)


class _Recorder(StatLoggerBase):
    def __init__(self, load: EngineLoad) -> None:
        self._load = load

    def record(self, scheduler_stats: Any, iteration_stats: Any, *args: Any, **kwargs: Any) -> None:
        if scheduler_stats is not None:
            self._load.running = scheduler_stats.num_running_reqs
            self._load.waiting = scheduler_stats.num_waiting_reqs
            self._load.kv_cache_usage = scheduler_stats.kv_cache_usage
        if iteration_stats is not None:
            self._load.preemptions += iteration_stats.num_preempted_reqs

    def log_engine_initialized(self) -> None:
        return None
