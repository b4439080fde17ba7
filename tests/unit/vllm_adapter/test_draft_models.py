"""Refuses models that cannot draft, and limits drafts to tokens that the target has."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from outrider.actors.drafter.engine import StepPlan, StepRow
from outrider.actors.vllm_adapter.draft_engine import DraftEngine
from outrider.actors.vllm_adapter.draft_worker import DraftWorker
from outrider.actors.vllm_adapter.engine_args import drafter_vllm_config
from outrider.cluster.config import ConfigError, DraftModelConfig
from tests.unit.drafter.draw_cases import SAMPLINGS, VOCAB, check_against_hand, draw_of, random_logits


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    """Write a checkpoint that takes images, without M-RoPE; nothing loads its weights. Of vLLM's, one that can be
    imported without torchvision."""
    from transformers import Gemma3nConfig

    directory = tmp_path_factory.mktemp("gemma")
    document = {**Gemma3nConfig().to_dict(), "architectures": ["Gemma3nForConditionalGeneration"]}
    (directory / "config.json").write_text(json.dumps(document, default=str))
    return directory


def test_a_multimodal_architecture_drafts_from_token_ids(gemma):
    """Where vLLM thinks that images may come it captures graphs that read embeddings, and ours have token ids."""
    config = DraftModelConfig(method="draft_model", model=str(gemma), dtype="float32", max_model_len=256)
    model_config = drafter_vllm_config(config, None, None).model_config
    assert model_config.is_multimodal_model
    assert not model_config.supports_multimodal_inputs


def test_one_whose_positions_have_several_dimensions_is_refused_before_it_loads(tmp_path):
    from transformers import PaddleOCRVLConfig

    text = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [16, 24, 24]}}
    document = PaddleOCRVLConfig(text_config=text).to_dict()
    document["architectures"] = ["PaddleOCRVLForConditionalGeneration"]
    (tmp_path / "config.json").write_text(json.dumps(document, default=str))
    config = DraftModelConfig(method="draft_model", model=str(tmp_path), dtype="float32", max_model_len=256)
    vllm_config = drafter_vllm_config(config, None, None)
    with pytest.raises(ConfigError, match=r"drafter\.model: .*\(M-RoPE\); use a text-only draft model"):
        DraftEngine(vllm_config, in_process=True)


def drawn_by_a_worker(sampling, num_drawable, num_tokens=VOCAB):
    """Return what is drawn by a rank whose model likes the last of its tokens best."""
    logits = random_logits(20, vocab=num_tokens)
    logits[:, -16:] += 20.0
    draws = [draw_of(sampling, position, alternatives=2) for position in range(20)]
    plan = StepPlan(rows=[StepRow([1], 0, ([0],), [one]) for one in draws], num_drawable=num_drawable)
    rank = SimpleNamespace(
        rank=0,
        _paged=lambda rows: torch.zeros(len(rows), 4),
        _head=None,
        _mask_id=None,
        model_runner=SimpleNamespace(model=SimpleNamespace(compute_logits=lambda hidden: logits)),
    )
    return logits, [one for (one,) in DraftWorker.draft(rank, plan)]


@pytest.mark.parametrize("num_tokens", [VOCAB, 512])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_nothing_is_proposed_that_the_target_has_no_token_for(name, num_tokens):
    common = num_tokens - 16
    _, unlimited = drawn_by_a_worker(SAMPLINGS[name], None, num_tokens)
    if "only" not in name:
        assert any(one.token >= common for one in unlimited)
    logits, drawn = drawn_by_a_worker(SAMPLINGS[name], common, num_tokens)
    for position, one in enumerate(drawn):
        check_against_hand(one, SAMPLINGS[name], logits[position, :common], position)
        named = [one.token, *(token for token, _ in one.alternatives), *([] if one.q_ids is None else one.q_ids)]
        assert max(named) < common
