"""Full CUDA graphs of a draft model's steps, played on a CPU by draft_engine_graphs.py: vLLM's dispatcher and
what its runner captures are real, a graph is the captured step run again with what it was captured with."""

import pytest

from tests.integration.test_draft_engine import script
from tests.support.models import draft_engine_graphs
from tests.support.models.draft_engine_graphs import COUNTS
from tests.support.models.tiny_kinds import build_tiny_windowed

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(600)]


@pytest.fixture(scope="module", params=["dense", "windowed"])
def played(request, models, tmp_path_factory):
    """windowed: two groups of KV blocks, and layers that see 24 tokens, less than a block."""
    player = draft_engine_graphs.__file__
    if request.param == "dense":
        return script(player, models.drafter) | {"of": 1}
    return script(player, build_tiny_windowed(tmp_path_factory.mktemp("windowed"), 24)) | {"of": 2}


def test_what_graphs_give_read_and_write_is_what_a_step_without_them_does(played):
    assert played["groups"] == played["of"]
    assert played["problems"] == []


def test_steps_of_one_token_a_row_are_full_graphs_and_longer_ones_are_not(played):
    hits = played["hits"]
    assert {str(count) for count in COUNTS} <= hits["FULL"].keys()
    assert hits["PIECEWISE"]
    assert hits["NONE"], "more tokens than the largest graph has"
    assert played["padded"] >= 20, "rows of nothing"


def test_where_attention_has_no_full_graphs_vllm_takes_pieces(played):
    assert played["without support"] == "PIECEWISE"
