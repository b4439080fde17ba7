"""``serving.autoscaling`` and ``drafter.autoscaling``: how many target replicas there are to be, and how many drafters
of the pool, and by what."""

from __future__ import annotations

from pydantic import Field, model_validator

from outrider.cluster.config_section import Section

REASONS = ("steady", "queue", "refused", "kv", "round", "idle", "loading", "no_data", "bounds")
"""Why there are to be so many: nothing calls for a change; work waits too long; requests were refused; KV caches are
full; steps are too long; there is room for one less; what was called for is being loaded; replicas or callers said
nothing lately; the configuration's limits have changed."""


class AutoscalingConfig(Section):
    """As many target replicas as the load takes; [autoscaling.md](autoscaling.md) says how that is told."""

    min: int = 1
    """Replicas that there always are. At least 1: a request that no replica takes could not be answered for as long as
    a model takes to load."""

    max: int
    """Replicas that there are at most."""

    target_queue_s: float = Field(5.0, gt=0, le=3600)
    """How long requests that wait for a replica's engine may wait: their tokens, prompt and expected answer, by the
    tokens a second that the replicas were measured to do. What is longer calls for more replicas."""

    target_round_ms: float | None = Field(None, gt=0, allow_inf_nan=False)
    """How long a step of the target, a round where it speculates, may take in the median. A batch of more requests has
    longer ones: what is above it calls for more replicas, as long as there are more requests than replicas. None: steps
    may be as long as they are."""

    target_kv_usage: float = Field(0.9, gt=0, le=1)
    """Share of their KV caches that running requests may take while others wait. More calls for more replicas."""

    upscale_delay_s: float = Field(5.0, ge=0, le=3600)
    """How long more replicas have to be called for before they are started."""

    downscale_delay_s: float = Field(300.0, ge=0, le=86_400)
    """How long one replica less has to do before one is taken away; the next one as much later. Starting one again
    takes as long as its models take to load."""

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


POOL_REASONS = ("targets", "gain", "idle", "probe", "no_data", "bounds")
"""Why there are to be so many drafters: as many as the targets at work take; fewer, since more would gain less than
they cost; no target is at work; to see what one gains now; nobody has said anything lately; the configuration's
limits."""


class PoolScalingConfig(Section):
    """As many drafters in a pool as pay for themselves; [pool.md](pool.md) says how that is told."""

    min: int = Field(0, ge=0, le=1024)
    """Drafters that there always are. 0: where none pays, all targets decode plainly."""

    max: int = Field(ge=1, le=1024)
    """Drafters that there are at most."""

    targets_per_drafter: int = Field(4, ge=1, le=1024)
    """For so many targets with requests one drafter is called for. 4: by tokens a second of each accelerator within 3%
    of the best of 1, 2, 4 and 8, for drafters of 8B, 1B and 0.6B at batch 1 and 8, as simulated
    ([emulation.md](emulation.md#the-curve)). A large drafter or batch does best with 2, a small one at batch 1 with 8;
    larger batches were not simulated."""

    worth: float = Field(1.0, ge=0, le=1000, allow_inf_nan=False)
    """What a drafter has to gain, in tokens a second over plain decoding, by what its accelerators would do as part of
    a target. 0: any gain will do."""

    upscale_delay_s: float = Field(5.0, ge=0, le=3600)
    """How long more drafters have to be called for before they are started."""

    downscale_delay_s: float = Field(300.0, ge=0, le=86_400)
    """How long one drafter less has to do before one is taken away; the next one as much later."""

    probe_s: float = Field(900.0, ge=1, le=86_400)
    """Where none pays and requests run: how long until one is started to see whether that has changed."""

    @model_validator(mode="after")
    def _in_order(self) -> PoolScalingConfig:
        if self.max < self.min:
            raise ValueError(f"max: {self.max} is below min ({self.min}); raise the first or lower the second")
        return self
