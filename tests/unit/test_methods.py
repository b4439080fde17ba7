"""`outrider methods`: what config.json says a checkpoint is, which methods fit a target, and the table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.cluster.co_located_config import CO_LOCATED_METHODS
from outrider.cluster.config import ConfigError
from outrider.cluster.drafter_config import REMOTE_METHODS
from outrider.deploy.cli import main
from outrider.deploy.models.check import check_drafts, check_heads, check_mtp
from outrider.deploy.models.method_guide import Build, Candidate, advise, kind_of

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 32,
    "num_attention_heads": 4,
}
SMALL = {**LLAMA, "num_hidden_layers": 2, "hidden_size": 32}
MIMO = {**LLAMA, "architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": 1}
CPU = Build(gpu=False, arctic_inference=False)


def advice(target: dict[str, Any], *drafters: dict[str, Any], build: Build = CPU, same: bool | None = True) -> dict:
    candidates = [Candidate(f"/models/{i}", kind_of(drafter), same) for i, drafter in enumerate(drafters)]
    return {(each.method, each.placement): each for each in advise(kind_of(target), candidates, build)}


@pytest.mark.parametrize(
    ("document", "kind"),
    [
        (LLAMA, "model"),
        (MIMO, "model"),
        ({"architectures": ["EagleLlamaForCausalLM"], "model_type": "eagle"}, "eagle"),
        ({"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}, "eagle3"),
        ({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 32000}, "eagle3"),
        ({"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"}, "eagle3"),
        ({"architectures": ["MedusaModel"], "model_type": "medusa"}, "medusa"),
        ({"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "dflash_config": {}}, "dflash"),
        ({"architectures": ["Qwen3DSparkModel"]}, "dspark"),
        ({"architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator"}, "mlp_speculator"),
        ({}, "model"),
    ],
)
def test_a_checkpoint_is_known_by_its_config(document, kind):
    assert kind_of(document).kind == kind


@pytest.mark.parametrize(
    ("document", "layers", "family"),
    [
        (LLAMA, 0, False),
        (MIMO, 1, True),
        ({"model_type": "deepseek_v3", "num_nextn_predict_layers": 1}, 1, True),
        ({"model_type": "qwen3_5", "text_config": {"mtp_num_hidden_layers": 1}}, 1, True),
        ({"model_type": "inkling_model", "mtp_config": {"num_nextn_predict_layers": 3}}, 3, True),
        ({"model_type": "homemade", "num_nextn_predict_layers": 2}, 2, False),
    ],
)
def test_layers_that_predict_ahead_are_found(document, layers, family):
    kind = kind_of(document)
    assert (kind.mtp_layers, kind.mtp_family) == (layers, family)


def test_the_size_of_a_dense_model_is_estimated():
    qwen = {
        "vocab_size": 151936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    }
    assert kind_of(qwen).num_parameters == pytest.approx(1.54e9, rel=0.01), "Qwen2.5 1.5B"
    assert kind_of({**qwen, "num_experts": 64}).num_parameters is None


def test_every_method_is_judged_in_every_place_it_has():
    judged = advice(LLAMA)
    expected = {(m, "with_target") for m in REMOTE_METHODS} | {(m, "co_located") for m in CO_LOCATED_METHODS}
    assert set(judged) == {*expected, ("mlp_speculator", "-")}
    assert all(each.reason for each in judged.values())


def test_lookups_fit_any_target_and_heads_need_to_be_there():
    judged = advice(LLAMA)
    verdicts = {key: each.verdict for key, each in judged.items()}
    assert (
        verdicts["ngram", "with_target"]
        == verdicts["suffix", "with_target"]
        == verdicts["ngram", "co_located"]
        == "fits"
    )
    assert verdicts["eagle3", "co_located"] == verdicts["medusa", "co_located"] == "possible"
    assert verdicts["draft_model", "with_target"] == "possible"
    assert verdicts["mtp", "co_located"] == verdicts["mlp_speculator", "-"] == "refused"
    assert "hidden states" in judged["eagle3", "co_located"].reason


def test_a_smaller_model_of_the_same_tokenizer_fits():
    found = advice(LLAMA, SMALL)["draft_model", "with_target"]
    assert (found.verdict, found.model) == ("fits", "/models/0")
    assert "times smaller" in found.reason


@pytest.mark.parametrize(
    ("drafter", "same", "reason"),
    [
        ({**SMALL, "vocab_size": 999}, None, "vocabulary of 999 tokens, the target's has 1000"),
        ({**SMALL, "vocab_size": 999}, False, "another tokenizer"),
        (SMALL, False, "another tokenizer"),
        ({**LLAMA, "num_hidden_layers": 30}, True, "only 1.1 times smaller"),
    ],
)
def test_a_drafter_that_does_not_fit_is_named_with_the_reason(drafter, same, reason):
    found = advice(LLAMA, drafter, same=same)["draft_model", "with_target"]
    assert found.verdict == "possible"
    assert f"/models/0: {reason}" in found.reason


def test_a_tokenizer_that_is_padded_to_another_size_fits_in_a_drafter_actor_alone():
    found = advice(LLAMA, {**SMALL, "vocab_size": 960}, same=True)
    assert (found["draft_model", "with_target"].verdict, found["draft_model", "co_located"].verdict) == (
        "fits",
        "possible",
    )
    assert "vocabulary of 960 tokens" in found["draft_model", "co_located"].reason


def test_heads_fit_a_target_of_their_width():
    eagle3 = {"architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 64}
    assert advice(LLAMA, eagle3)["eagle3", "co_located"].model == "/models/0"
    wide = advice(LLAMA, {**eagle3, "hidden_size": 128})["eagle3", "co_located"]
    assert wide.verdict == "possible"
    assert "hidden size of 128" in wide.reason
    named = {**eagle3, "hidden_size": 128, "target_hidden_size": 64}
    assert advice(LLAMA, named)["eagle3", "co_located"].verdict == "fits"


def test_mtp_fits_where_the_model_brings_the_layer():
    assert advice(MIMO)["mtp", "co_located"].verdict == "fits"
    unknown = advice({**LLAMA, "num_nextn_predict_layers": 1})["mtp", "co_located"]
    assert (unknown.verdict, "LlamaForCausalLM" in unknown.reason) == ("refused", True)


def test_the_build_decides_about_kernels_and_packages():
    cpu, gpu = advice(LLAMA), advice(LLAMA, build=Build(gpu=True, arctic_inference=True))
    assert cpu["ngram_gpu", "co_located"].verdict == cpu["suffix", "co_located"].verdict == "refused"
    assert gpu["ngram_gpu", "co_located"].verdict == gpu["suffix", "co_located"].verdict == "fits"


def test_a_checkpoint_of_another_kind_than_the_method_is_refused():
    medusa = {"architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": 64}
    with pytest.raises(ConfigError, match=r"holds medusa heads.*drafts with a language model.*method: medusa"):
        check_drafts(medusa, "draft_model")
    with pytest.raises(ConfigError, match=r"holds a language model, and method medusa .*method: draft_model"):
        check_drafts(LLAMA, "medusa")
    check_drafts(LLAMA, "eagle")  # vLLM takes heads under the model's own name
    check_drafts(medusa, "medusa")
    check_heads(LLAMA, medusa)
    with pytest.raises(ConfigError, match="hidden size of 128, the target's is 64"):
        check_heads(LLAMA, {**medusa, "hidden_size": 128})


def test_mtp_on_a_target_without_the_layer_is_refused():
    check_mtp(MIMO)
    with pytest.raises(ConfigError, match="no layers that predict further tokens"):
        check_mtp(LLAMA)
    with pytest.raises(ConfigError, match="does not draft with the extra layers of LlamaForCausalLM"):
        check_mtp({**LLAMA, "num_nextn_predict_layers": 1})


@pytest.fixture
def checkpoints(tmp_path: Path, outrider_home: Path) -> Path:
    for name, document in (("target", LLAMA), ("small", SMALL), ("heads", {"model_type": "medusa", "hidden_size": 64})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(document))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    return tmp_path


def test_the_command_finds_drafters_beside_the_target(checkpoints, capsys):
    assert main(["methods", str(checkpoints / "target")]) == 0
    printed = capsys.readouterr().out
    assert f"drafter.model: {checkpoints / 'small'}" in printed
    assert f"drafter.model: {checkpoints / 'heads'}" in printed
    assert "vllm#52362" in printed
    lines = [line.split()[:3] for line in printed.splitlines()]
    assert ["draft_model", "with_target", "fits"] in lines
    assert ["eagle3", "co_located", "possible"] in lines
    assert ["mlp_speculator", "-", "refused"] in lines


def test_the_command_judges_a_configuration(checkpoints, tmp_path, capsys):
    file = tmp_path / "c.yaml"
    drafter = {"method": "draft_model", "model": str(checkpoints / "small")}
    file.write_text(json.dumps({"target": {"model": str(checkpoints / "target")}, "drafter": drafter}))
    assert main(["methods", "--config", str(file), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["configured"]["model"] == str(checkpoints / "small")
    drafter = {"method": "mtp", "placement": "co_located"}
    file.write_text(json.dumps({"target": {"model": str(checkpoints / "target")}, "drafter": drafter}))
    assert main(["methods", "--config", str(file)]) == 1
    assert "configured: mtp, co_located: refused" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "no target"),
        (["m", "--config", "smollm2"], "two targets"),
        (["/nowhere/at/all"], "target.model"),
    ],
)
def test_what_cannot_be_judged_is_said(arguments, said, capsys, outrider_home):
    assert main(["methods", *arguments]) == 2
    assert said in capsys.readouterr().err
