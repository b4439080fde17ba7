"""CUDA graphs of whole decode steps, of pieces, and none: the draft model's engine alone, on one GPU; on and off, both
sides of a served pair."""

import pytest

pytest.importorskip("ray")
pytest.importorskip("grpc")

from tests.gpu.engines.deployments import pair_with_graphs
from tests.integration.test_draft_engine import rounds
from tests.integration.test_equality import check_against, plain

__all__ = ["plain"]

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800), pytest.mark.gpus(1)]


SECTIONS = {
    "FULL": {},
    "PIECEWISE": {"engine_args": {"compilation_config": {"cudagraph_mode": "PIECEWISE"}}},
    "eager": {"engine_args": {"enforce_eager": True}},
}


@pytest.fixture(scope="module")
def reports(models):
    return {graphs: rounds(models.drafter, **section) for graphs, section in SECTIONS.items()}


@pytest.mark.parametrize("graphs", SECTIONS)
def test_what_is_drafted_ahead_is_what_would_be_drafted_at_once(reports, graphs):
    for name, seen in reports[graphs].items():
        assert (seen["differ"], seen["agree"]) == ([], 120), name
        captured = {hit.split()[0] for hit in seen["graphs"]} - {"NONE"}
        # A FULL graph has the steps of one token a row; prompts, and who catches up, have pieces.
        assert captured == {"FULL": {"FULL", "PIECEWISE"}, "PIECEWISE": {"PIECEWISE"}, "eager": set()}[graphs], name


@pytest.mark.parametrize("graphs", ["FULL", "PIECEWISE"])
def test_the_drafts_are_the_same_as_without_graphs(reports, graphs):
    for name, seen in reports[graphs].items():
        assert seen["drafted"] == reports["eager"][name]["drafted"], name


@pytest.mark.gpus(2)
@pytest.mark.parametrize("drafter_eager", [False, True])
@pytest.mark.parametrize("target_eager", [False, True])
def test_a_pair_with_graphs_and_without(plain, added, models, target_eager, drafter_eager):
    sections = pair_with_graphs(models, target_eager, drafter_eager)
    check_against(added(f"eager: {target_eager}, {drafter_eager}", **sections), plain)
