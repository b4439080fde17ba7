"""What guides to vLLM's speculative decoding write, with small models: it runs and gives the target's own tokens, or it
ends with one sentence that says what to write."""

from __future__ import annotations

import json
import shutil

import pytest

from outrider import LLM, SamplingParams
from tests.support.models import tiny_heads
from tests.support.models.offline_llm import run_jobs
from tests.support.models.reference import Reference

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900), pytest.mark.usefixtures("one_thread")]

PROMPTS = [list(b"The future of AI is"), list(b"one two one two one two one two")]
NUM_TOKENS = 32

GUIDES = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4},
    "ngram, both lengths": {
        "method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 5, "prompt_lookup_min": 2,
    },
    "draft model": {"method": "draft_model", "model": "drafter", "num_speculative_tokens": 5},
    "draft model of two ranks": {
        "method": "draft_model", "model": "drafter", "num_speculative_tokens": 5, "draft_tensor_parallel_size": 2,
    },
    "eagle": {"method": "eagle", "model": "eagle", "num_speculative_tokens": 3, "draft_tensor_parallel_size": 1},
    "eagle, not padded": {
        "method": "eagle", "model": "eagle", "num_speculative_tokens": 2, "disable_padded_drafter_batch": True,
    },
    "eagle3": {"method": "eagle3", "model": "eagle3", "num_speculative_tokens": 2},
    "mtp": {"method": "mtp", "num_speculative_tokens": 1},
    "one pass": {"method": "draft_model", "model": "one_pass", "num_speculative_tokens": 4, "parallel_drafting": True},
    "suffix": {"method": "suffix", "num_speculative_tokens": 15},
}  # fmt: skip

MORE_ARGUMENTS = {
    "ngram": {"cudagraph_capture_sizes": [6, 12, 18, 24]},  # n * (K + 1); without effect on CPU
    "draft model": {"compilation_config": {"cudagraph_capture_sizes": [6, 12, 18, 24]}},
}

ARGUMENTS = {
    "tensor_parallel_size": 1,
    "dtype": "float32",
    "enforce_eager": True,
    "async_scheduling": True,
    "distributed_executor_backend": "mp",
    "disable_log_stats": False,
    "max_model_len": 256,
    "max_num_seqs": 4,
    "kv_cache_memory_bytes": 16 << 20,
}


def job(name, models, heads):
    speculative = dict(GUIDES[name])
    drafts_remotely = speculative["method"] in ("ngram", "suffix", "draft_model")
    if (model := speculative.get("model")) is not None:
        speculative["model"] = str(models.drafter if model == "drafter" else heads / model)
    if speculative["method"] == "draft_model":
        speculative["kv_cache_memory_bytes"] = 16 << 20
    arguments = {**ARGUMENTS, **MORE_ARGUMENTS.get(name, {}), "model": str(target_of(name, models, heads))}
    if not drafts_remotely:
        arguments.pop("async_scheduling")  # on CPU, vLLM's own drafting does without
    return {
        "arguments": {**arguments, "speculative_config": speculative},
        "prompts": PROMPTS,
        "params": {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True},
    }


def target_of(name, models, heads):
    """Returns the target: a model with a layer for MTP where that is the method."""
    return heads / "mtp_target" if GUIDES[name]["method"] == "mtp" else models.target


@pytest.fixture(scope="module")
def heads(models, tmp_path_factory):
    """Builds the checkpoints of the methods that need one of their own. ``one_pass`` is a draft model as PARD's are."""
    root = tmp_path_factory.mktemp("heads")
    for name in ("eagle", "eagle3", "mtp_target"):
        getattr(tiny_heads, f"build_{name}")(root / name)
    one_pass = shutil.copytree(models.drafter, root / "one_pass") / "config.json"
    one_pass.write_text(json.dumps({**json.loads(one_pass.read_text()), "pard_token": 1}))
    return root


def check(names, models, heads):
    references = {target: Reference(target) for target in {target_of(name, models, heads) for name in names}}
    for name, found in zip(names, run_jobs([job(name, models, heads) for name in names]), strict=True):
        reference = references[target_of(name, models, heads)]
        assert "error" not in found, f"{name}: {found}"
        assert found["tokens"] == [reference.greedy(prompt, NUM_TOKENS) for prompt in PROMPTS], name
        assert found["counters"]["vllm:spec_decode_num_drafts"] > 0, name
        assert len(found["counters"]["vllm:spec_decode_num_accepted_tokens_per_pos"]), name


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(3))
def test_each_method_of_the_guides(models, heads, part):
    """In every run, test_llm.py has a draft model and test_mlp_speculator.py has heads."""
    check(list(GUIDES)[part::3], models, heads)


def test_former_names_say_what_is_written_today(models):
    with pytest.raises(TypeError, match=r"speculative_ratio: .* speculative_config"):
        SamplingParams(temperature=0.7, speculative_ratio=4)
    with pytest.raises(ValueError, match=r"speculative_model: .* speculative_config"):
        LLM(model=str(models.target), speculative_model=str(models.drafter))
    with pytest.raises(ValueError, match=r"num_speculative_tokens: .* speculative_config"):
        LLM(model=str(models.target), num_speculative_tokens=4)
    with pytest.raises(AttributeError, match=r"agenerate: .* AsyncLLM"):
        object.__new__(LLM).agenerate(["x"], None)
