"""A stored drafter has only what was trained, and goes together with its own target alone."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from outrider.actors.drafter.vocabulary import trained_on
from outrider.actors.learning.draft_models import load, tensors_of
from outrider.actors.learning.train import Trainer
from outrider.cluster.config import ConfigError
from outrider.cluster.vocabulary import read_vocabulary
from outrider.deploy.distill.models import (
    check_architecture,
    config_of_layers,
    from_layers,
    same_embeddings,
)
from outrider.deploy.distill.stored import DESCRIPTION, TENSORS, assemble, read, store
from outrider.deploy.models.check import check_vocabularies
from outrider.deploy.models.identity import Reference, weights_digest
from tests.support.models.tiny_models import build_tiny_llama


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return build_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def stored(target, tmp_path_factory):
    model = load(target, torch.float32, "cpu")
    drafter = from_layers(model, [0])
    trained = Trainer(drafter, 0.0, torch.float32).trained
    with torch.no_grad():
        trained["model.norm.weight"] += 0.25
    document = check_architecture(target, "TARGET")
    reference = Reference.of(target)
    out = tmp_path_factory.mktemp("stored") / "drafter"
    store(out, reference, target, config_of_layers(document, [0]), trained, {"steps": 0}, [3, 5])
    return out


def test_what_is_frozen_is_not_stored(stored, target):
    tensors = load_file(stored / TENSORS)
    assert not [name for name in tensors if "embed" in name or "lm_head" in name]
    assert {name for name in tensors if not name.startswith("model.layers.0.")} == {"model.norm.weight"}
    description = read(stored)
    assert description.borrowed == ["lm_head.weight", "model.embed_tokens.weight"]
    assert description.target == Reference.of(target)
    assert description.draft_vocabulary == [3, 5]


def test_assembled_it_is_a_checkpoint_of_the_trained_and_the_targets_tensors(stored, target, tmp_path):
    out = tmp_path / "model"
    assemble(stored, target, out)
    whole = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    assert whole.config.num_hidden_layers == 1
    assert torch.equal(whole.lm_head.weight, theirs.lm_head.weight)
    assert torch.equal(whole.model.norm.weight, theirs.model.norm.weight + 0.25)
    ours = whole.model.layers[0].mlp.up_proj.weight
    assert torch.equal(ours, theirs.model.layers[0].mlp.up_proj.weight)
    assert same_embeddings(target, out)
    assert trained_on(str(out)) == [3, 5]
    documents = [json.loads((path / "config.json").read_text()) for path in (target, out)]
    check_vocabularies(*documents, (read_vocabulary(str(target)), read_vocabulary(str(out))))


def test_in_8_bits_a_matrix_takes_half_and_is_off_by_half_a_step_of_its_row_at_most(stored, target, tmp_path):
    reference, whole = Reference.of(target), load_file(stored / TENSORS)
    config = config_of_layers(check_architecture(target, "TARGET"), [0])
    matrix = "model.layers.0.mlp.up_proj.weight"
    whole[matrix][0] = 0
    store(tmp_path / "stored", reference, target, config, whole, {"steps": 0}, bits=8)
    kept = load_file(tmp_path / "stored" / TENSORS)
    assert kept[matrix].dtype == torch.int8
    assert kept["model.norm.weight"].dtype == whole["model.norm.weight"].dtype
    assert (tmp_path / "stored" / TENSORS).stat().st_size < 0.6 * (stored / TENSORS).stat().st_size
    assemble(tmp_path / "stored", target, tmp_path / "model")
    assembled = load_file(tmp_path / "model" / "model.safetensors")
    assert assembled.keys() < dict(tensors_of(target)).keys()
    assert torch.equal(assembled["model.norm.weight"], whole["model.norm.weight"])
    before, after = whole[matrix].float(), assembled[matrix].float()
    assert not after[0].any()
    step = before.abs().amax(1, keepdim=True) / 127
    assert ((before - after).abs() <= step / 2 + before.abs() / 256).all()


def test_assembling_takes_the_place_of_an_assembled_drafter_and_of_nothing_else(stored, target, tmp_path):
    for _ in range(2):
        assemble(stored, target, tmp_path / "model")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter").write_text("dear")
    with pytest.raises(ConfigError, match=r"--out: .*home is there and no assembled drafter"):
        assemble(stored, target, tmp_path / "home")
    assert (tmp_path / "home" / "letter").read_text() == "dear"


def test_a_drafter_of_another_target_is_refused_by_name(stored, target, tmp_path):
    other = build_tiny_llama(tmp_path / "other-tiny", noise_of=target, noise=0.01)
    with pytest.raises(
        ConfigError, match=r"trained for tiny, and .*other-tiny is not the target: its tensors are others"
    ):
        assemble(stored, other, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_damage_is_found(stored, target, tmp_path):
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(stored, copy)
    tensors = load_file(copy / TENSORS)
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, copy / TENSORS)
    with pytest.raises(ConfigError, match="is damaged"):
        assemble(copy, target, tmp_path / "model")
    (copy / DESCRIPTION).write_text("{}")
    with pytest.raises(ConfigError, match="its format is not"):
        assemble(copy, target, tmp_path / "model")
    (copy / DESCRIPTION).unlink()
    with pytest.raises(ConfigError, match="is no stored drafter"):
        read(copy)


def test_the_digest_is_of_the_tensors_not_of_the_files(target, tmp_path):
    tensors = load_file(target / "model.safetensors")
    names = sorted(tensors)
    save_file({name: tensors[name] for name in names[:3]}, tmp_path / "a.safetensors")
    save_file({name: tensors[name] for name in names[3:]}, tmp_path / "b.safetensors")
    assert weights_digest(tmp_path) == weights_digest(target)
    tensors[names[0]].view(-1)[0] += 1
    save_file({name: tensors[name] for name in names[:3]}, tmp_path / "a.safetensors")
    assert weights_digest(tmp_path) != weights_digest(target)


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
def test_a_model_of_some_layers_computes_with_these(family):
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=60,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
    )
    target = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    drafter = from_layers(target, [0, 3]).eval()
    assert type(drafter) is type(target)
    ids = torch.arange(9)[None]
    before = drafter(ids, use_cache=False).logits
    target.model.layers = torch.nn.ModuleList([target.model.layers[0], target.model.layers[3]])
    target.config.num_hidden_layers = 2
    torch.testing.assert_close(target(ids, use_cache=False).logits, before)
    names = Trainer(drafter, 0.0, torch.float32).trained
    assert names
    assert all(name.startswith(("model.layers.", "model.norm.")) for name in names)
