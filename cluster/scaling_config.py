"""Sections ``serving.autoscaling`` and ``drafter.autoscaling``: how the number of target replicas and of a pool's
drafters follows the load."""

from __future__ import annotations

from pydantic import Field, model_validator

from outrider.cluster.config_section import Section

REASONS = ("steady", "queue", "kv", "round", "idle", "loading", "no_data")
"""Why a number of replicas is desired: nothing calls for a change; requests wait too long; KV caches are full; steps
are too long; one replica fewer is enough; replicas load; replicas have not reported lately."""


class AutoscalingConfig(Section):
    """As many target replicas as the load needs, see [autoscaling.md](autoscaling.md)."""

    min: int = 1
    """Least number of replicas, at least 1: without any, requests would wait for as long as a model takes to load."""

    max: int
    """Greatest number of replicas."""

    target_queue_s: float = Field(5.0, gt=0, le=3600)
    """Longest time that requests may wait for an engine before replicas are added. Computed as the waiting tokens,
    prompts and expected answers, divided by the measured tokens per second of all replicas."""

    target_round_ms: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Target median step time in milliseconds. When exceeded, replicas are added, as long as there are more requests
    than replicas. Null: no limit."""

    target_kv_usage: float = Field(0.9, gt=0, le=1)
    """Mean KV cache usage above which replicas are added while requests wait."""

    upscale_delay_s: float = Field(5.0, ge=0, le=3600)
    """How long the load must need more replicas, without a break, before they are started."""

    downscale_delay_s: float = Field(300.0, ge=0, le=86_400)
    """How long one replica fewer must be enough, without a break, before one is stopped; the next one as much later."""

    @model_validator(mode="after")
    def _at_least_one(self) -> AutoscalingConfig:
        if self.min < 1:
            raise ValueError(
                f"min: {self.min} replicas would answer nothing until a model is loaded; write 1 or more, or take the "
                "application down"
            )
        if self.max < self.min:
            raise ValueError(f"max: {self.max} is below min ({self.min}); raise the first or lower the second")
        return self


POOL_REASONS = ("targets", "gain", "idle", "probe", "no_data")
"""Why a number of drafters is desired: the busy targets take so many; more would gain less than they cost; no target
is busy; one is tried to measure its gain; targets have not reported lately."""


class PoolScalingConfig(Section):
    """As many drafters in a pool as gain what they cost, see [pool.md](pool.md)."""

    min: int = Field(0, ge=0, le=1024)
    """Least number of drafters. 0: while none pays, targets decode without drafts."""

    max: int = Field(ge=1, le=1024)
    """Greatest number of drafters."""

    targets_per_drafter: int = Field(4, ge=1, le=1024)
    """Busy targets per drafter. 4 is within 3% of the best of 1, 2, 4 and 8 in tokens per second and accelerator, for
    drafters of 8B, 1B and 0.6B at batch 1 and 8, simulated ([emulation.md](emulation.md#the-curve)). A large drafter
    or batch does best with 2, a small drafter at batch 1 with 8; larger batches were not simulated."""

    worth: float = Field(1.0, ge=0, le=1000, allow_inf_nan=False)
    """What a drafter must gain, in tokens per second over plain decoding, relative to what its accelerators would do as
    part of a target. 0: any gain is enough."""

    upscale_delay_s: float = Field(5.0, ge=0, le=3600)
    """How long targets must need more drafters, without a break, before they are started. The first one of an empty
    pool is started at once."""

    downscale_delay_s: float = Field(300.0, ge=0, le=86_400)
    """How long one drafter fewer must be enough, without a break, before one is stopped; the next one as much later."""

    probe_s: float = Field(900.0, ge=1, le=86_400)
    """How often a drafter is started to measure its gain, while requests run and none pays."""

    @model_validator(mode="after")
    def _in_order(self) -> PoolScalingConfig:
        if self.max < self.min:
            raise ValueError(f"max: {self.max} is below min ({self.min}); raise the first or lower the second")
        return self
