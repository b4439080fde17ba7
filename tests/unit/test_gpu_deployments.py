"""Every deployment of the tests, and every preset, is planned as on a machine with GPUs."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from outrider.cluster.config import ConfigError, DraftModelConfig, OutriderConfig, parse_config
from outrider.cluster.device_defaults import with_device_defaults
from outrider.deploy import app
from outrider.deploy.preset import preset_names, resolve_config
from tests.gpu.engines.deployments import (
    SIDES,
    measured_pair,
    pair_of_kind,
    pair_over,
    pair_with_graphs,
    target_and_lookup,
)
from tests.support.cluster.serving import Models, configurations

pytestmark = pytest.mark.usefixtures("outrider_home")

TARGET, DRAFTER, OTHER = Path("/models/target"), Path("/models/drafter"), Path("/models/other")
ADAPTERS = {name: OTHER / name for name in ("near", "far", "own", "later")}
MODELS = Models(TARGET, DRAFTER, OTHER, OTHER, ADAPTERS, ADAPTERS, OTHER, OTHER)


def added() -> dict[str, dict[str, Any]]:
    """By name: what tests/gpu/engines adds."""
    return {
        **{method: target_and_lookup(MODELS, method) for method in ("ngram", "suffix")},
        **{f"over {backend}": pair_over(MODELS, backend) for backend in ("auto", "nccl")},
        **{f"eager {both}": pair_with_graphs(MODELS, *both) for both in product((False, True), repeat=2)},
        **{f"kind {kind}": pair_of_kind(kind, TARGET, DRAFTER, 3) for kind in SIDES},
        **{f"measured, {ranks} ranks": measured_pair(TARGET, DRAFTER, 4, ranks) for ranks in (1, 2)},
    }


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


def test_every_deployment_of_the_tests_can_start_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "engine_on_gpu", lambda: True)
    sections = {**configurations(MODELS), **added()}
    problems = {name: problem(parse_config(each)) for name, each in sections.items()}
    assert {name: why for name, why in problems.items() if why} == {}


def test_drafts_of_the_tests_have_time_to_come_on_gpus() -> None:
    """A draft model as large as its target needs more for K drafts than the default deadline of two target steps."""
    late = []
    for name, each in {**configurations(MODELS), **added()}.items():
        config = with_device_defaults(parse_config(each), gpu=True)
        if isinstance(config.drafter, DraftModelConfig) and config.link.round_deadline_steps is not None:
            late.append(name)
    assert late == []


def test_every_preset_can_start_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "engine_on_gpu", lambda: True)
    problems = {name: problem(resolve_config(name)) for name in preset_names()}
    assert {name: why for name, why in problems.items() if why} == {}
