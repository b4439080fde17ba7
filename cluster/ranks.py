"""Where an engine's tensor-parallel ranks go and what they are called: plain data that travels to the executor."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

NAMESPACE = "outrider"
"""Ray namespace of every named actor: an engine's own Ray job would otherwise get an anonymous one."""

V1_RUNNER = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
"""Environment of whoever builds or runs an engine: our runners extend vLLM's V1 model runner, and with Triton vLLM
would take V2."""

_KEY = "outrider_ranks"


@dataclass(frozen=True)
class RankPlacement:
    """Rank i is the Ray actor actor_names[i] on bundle bundle_indices[i], bound to cores[i] (CPU only)."""

    ray_address: str
    """GCS address: an engine core is a process of its own and must find the same Ray cluster."""

    actor_names: list[str]
    bundle_indices: list[int]
    cores: list[list[int]] | None = None
    env_vars: dict[str, str] = field(default_factory=dict)
    """Environment of every rank's process, set before torch loads."""

    def as_additional_config(self) -> dict[str, Any]:
        """The form in which it rides in vLLM's ``additional_config``."""
        return {_KEY: asdict(self)}

    @classmethod
    def of(cls, vllm_config: Any) -> RankPlacement:
        return cls(**vllm_config.additional_config[_KEY])
