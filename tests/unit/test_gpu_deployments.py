"""Every deployment of the tests, and every preset, is planned as on a machine with GPUs."""

from __future__ import annotations

import pytest

from outrider.cluster.config import ConfigError, DraftModelConfig, OutriderConfig
from outrider.cluster.device_defaults import with_device_defaults
from outrider.deploy import app
from outrider.deploy.preset import preset_names, resolve_config

pytestmark = pytest.mark.usefixtures("outrider_home")


def problem(config: OutriderConfig) -> str | None:
    """Why a deployment cannot start on GPUs."""
    try:
        plan = app.plan_replica(config)
    except ConfigError as error:
        return str(error)
    config = with_device_defaults(config, gpu=True)
    drafter = config.drafter if isinstance(config.drafter, DraftModelConfig) else None
    pooled = drafter is not None and drafter.pooled
    own = 0 if drafter is None else drafter.tensor_parallel_size
    gpus = plan.total("GPU", 1, 0), plan.total("GPU", 0, 1)
    if gpus != (wanted := (config.target.num_ranks + (0 if pooled else own), own if pooled else 0)):
        return f"GPUs of a replica and of a drafter of the pool: {gpus}, not {wanted}"
    for name, section in {"target": config.target, **({} if drafter is None else {"drafter": drafter})}.items():
        # As vLLM's SchedulerConfig does.
        if section.max_num_batched_tokens is not None and section.max_num_batched_tokens < section.max_num_seqs:
            return f"{name}.max_num_batched_tokens: {section.max_num_batched_tokens} < {section.max_num_seqs} requests"
    return None


def test_every_preset_can_start_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "engine_on_gpu", lambda: True)
    problems = {name: problem(resolve_config(name)) for name in preset_names()}
    assert {name: why for name, why in problems.items() if why} == {}
