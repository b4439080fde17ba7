"""CUDA graphs on and off: the draft model's engine alone, on one GPU, and both sides of a served pair."""

import pytest

pytest.importorskip("ray")
pytest.importorskip("grpc")

from tests.integration.test_draft_engine import rounds
from tests.integration.test_tensor_parallel import check, plain
from tests.serving import engine

__all__ = ["plain"]

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800), pytest.mark.gpus(1)]


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_what_is_drafted_ahead_is_what_would_be_drafted_at_once(models, eager):
    for name, seen in rounds(models.drafter, eager).items():
        assert (seen["differ"], seen["agree"]) == ([], 120), name
        captured = {mode: hits for mode, hits in seen["graphs"].items() if not mode.startswith("NONE ")}
        assert bool(captured) is not eager, f"{name}: {seen['graphs']}"


@pytest.mark.gpus(2)
@pytest.mark.parametrize("drafter_eager", [False, True])
@pytest.mark.parametrize("target_eager", [False, True])
def test_a_pair_with_graphs_and_without(plain, added, models, target_eager, drafter_eager):
    sections = {
        "target": engine(models.target, enforce_eager=target_eager),
        "drafter": {"method": "draft_model", **engine(models.drafter, enforce_eager=drafter_eager)},
        "speculation": {"adaptive": False},
    }
    check(added(f"eager: {target_eager}, {drafter_eager}", **sections), plain)
