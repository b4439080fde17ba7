"""A drafter is served and measured beside the target that it was trained for, or refused by field."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch

from outrider.actors.learning.draft_models import load, tensors_of
from outrider.actors.learning.train import Trainer
from outrider.actors.learning.versions import VersionStore
from outrider.cluster.config import ConfigError, parse_config
from outrider.deploy.distill.models import check_architecture, config_of_layers, from_layers
from outrider.deploy.distill.stored import assemble, store
from outrider.deploy.models.check import check_models
from outrider.deploy.models.identity import Reference, check_made_for
from tests.support.models.tiny_models import build_tiny_llama, pad_vocabulary

pytestmark = pytest.mark.usefixtures("outrider_home")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A target, a drafter of its own, and two more targets: of other weights, and of other shapes."""
    home = tmp_path_factory.mktemp("models")
    target = build_tiny_llama(home / "tiny")
    drafter = from_layers(load(target, torch.float32, "cpu"), [0])
    trained = Trainer(drafter, 0.0, torch.float32).trained
    config = config_of_layers(check_architecture(target, "TARGET"), [0])
    reference = Reference.of(target)
    store(home / "stored", reference, target, config, trained, {})
    assemble(home / "stored", target, home / "drafter")
    other = build_tiny_llama(home / "other", noise_of=target, noise=0.01)
    padded = pad_vocabulary(home / "padded", target, 320)
    return SimpleNamespace(target=target, drafter=home / "drafter", other=other, padded=padded)


def serve(target, drafter, **more):
    section = {"method": "draft_model", "model": str(drafter), **more}
    check_models(parse_config({"target": {"model": str(target)}, "drafter": section}))


@pytest.mark.parametrize("placement", [{}, {"placement": "co_located"}], ids=["remote", "co_located"])
def test_a_server_takes_the_target_that_it_was_trained_for_alone(models, placement):
    serve(models.target, models.drafter, **placement)
    with pytest.raises(
        ConfigError,
        match=r"drafter\.model: .*drafter was trained for tiny, and the target .*padded is another checkpoint "
        r"\(its tensors' shapes have sha256 .*set target\.model to the one.*outrider distill",
    ):
        serve(models.padded, models.drafter, **placement)


def test_a_version_that_it_has_learned_is_as_its_first(models, tmp_path):
    name = "model.norm.weight"
    learned = {name: dict(tensors_of(models.drafter))[name] + 1}
    file = VersionStore(tmp_path / "versions", models.drafter).save(1, learned)
    kept = shutil.copytree(models.drafter, tmp_path / "version-1")
    shutil.copyfile(file, kept / "model.safetensors")
    serve(models.target, kept)
    with pytest.raises(ConfigError, match="was trained for tiny"):
        serve(models.padded, kept)


def test_other_token_ids_are_another_target(models, tmp_path):
    other = shutil.copytree(models.target, tmp_path / "renamed")
    document = json.loads((other / "tokenizer.json").read_text())
    document["model"]["vocab"]["!!"] = 270
    (other / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(ConfigError, match="its token ids have"):
        check_made_for(other, models.drafter)


def test_a_server_compares_shapes_and_acceptance_every_tensor(models):
    serve(models.other, models.drafter)
    with pytest.raises(ConfigError, match="its tensors have"):
        check_made_for(models.other, models.drafter, every_tensor=True)
