"""What training takes is told before anything is loaded, and is what it does take."""

import pytest
import torch

from outrider.actors.learning.draft_models import freeze
from outrider.actors.learning.memory import TRAINED_BYTES, ParameterCounts, check_fits
from outrider.cluster.config import ConfigError
from tests.unit.learning.tiny_learner import drafter, learner, many


def test_what_training_takes_is_counted_from_the_checkpoint(tmp_path):
    model = drafter()
    model.save_pretrained(tmp_path)
    counts = ParameterCounts.of(tmp_path)
    trained = set(freeze(model, torch.float32))
    sizes = {True: 0, False: 0}
    for name, parameter in model.named_parameters():
        sizes[name in trained] += parameter.numel()
    assert counts == ParameterCounts(sizes[True], sizes[False])

    one = learner(model=model, steps_per_version=1000)
    one.add(many(40))
    assert one.work()
    trainer, held = one._trainer, 0
    with one.holding(one.serving.tensors):  # as while versions are compared
        for parameter in trainer.trained.values():
            held += 2 * parameter.nbytes + parameter.grad.nbytes
            held += sum(part.nbytes for part in trainer.optimizer.state[parameter].values() if part.dim())
    assert held == TRAINED_BYTES * counts.trained


def test_an_8b_drafter_is_refused_on_80_gb_by_its_size():
    counts = ParameterCounts(trained=6_979_588_096, frozen=1_050_673_152)
    with pytest.raises(ConfigError, match=r"^drafter\.learn: .* takes 141\.7 GB .* the trainer's GPU has 80\.0 GB"):
        check_fits(counts, 2, 80_000_000_000, "the trainer's GPU")
    check_fits(counts, 2, 144_000_000_000, "the trainer's GPU")
