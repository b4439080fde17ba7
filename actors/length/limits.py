"""What a length controller may do, how long it remembers, and what it decides."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of one request in one round. k: tokens wanted on a hit, 0 for no drafting at all. k_miss: tokens worth waiting
    for on a miss, 0 to k."""

    k: int
    k_miss: int


@dataclass(frozen=True, slots=True)
class LengthLimits:
    """Raises ValueError that names the field and the fix."""

    max_tokens: int
    """K: most tokens drafted a request and round."""

    max_requests: int = 256
    """Most requests in a step; sizes the table of step costs."""

    draft_ahead: bool = True
    """False: every answer is drafted while the target waits, so no hits are expected to begin with."""

    uniform_steps: bool = False
    """Steps in which every request has 1 + K tokens may be cheaper (full CUDA graphs): measure by how much."""

    first_tokens: int = 2
    """Asked for until the first step and the first answer have been measured."""

    probe_tokens: int = 2
    probe_rounds: int = 4
    """A request that is switched off is tried again with probe_tokens for so many rounds."""

    probe_after: int = 16
    probe_after_max: int = 512
    """Rounds until the first probe; doubled by each that fails, up to the maximum."""

    probe_share: float = 0.01
    """Most of the time that probes may cost."""

    hysteresis: float = 0.02
    """Speculation starts when it promises this much more tokens a second, and stops when it promises none more."""

    plan_rounds: int = 8
    """Lengths are worked out anew every so many rounds, and whenever the requests change."""

    request_memory: int = 64
    deployment_memory: int = 500
    """Rounds of a request after which what it showed has faded, in its own estimate and in everybody's average."""

    step_memory: int = 100
    """Steps of a size after which a measured duration has faded."""

    def __post_init__(self) -> None:
        for name in ("max_tokens", "max_requests", "first_tokens", "probe_tokens", "probe_rounds", "plan_rounds"):
            self._at_least(name, 1)
        for name in ("probe_after", "request_memory", "deployment_memory", "step_memory"):
            self._at_least(name, 2)
        if self.probe_after_max < self.probe_after:
            raise ValueError(f"probe_after_max ({self.probe_after_max}) is below probe_after ({self.probe_after})")
        for name in ("probe_share", "hysteresis"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} ({getattr(self, name)}) must be from 0 to below 1")

    def _at_least(self, name: str, least: int) -> None:
        if getattr(self, name) < least:
            raise ValueError(f"{name} ({getattr(self, name)}) must be at least {least}")
