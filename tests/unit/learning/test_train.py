"""A training step on tiny models, and the draft vocabulary."""

import dataclasses

import numpy as np
import pytest
import torch

from outrider.actors.learning.texts import TOP, Text
from outrider.actors.learning.train import Trainer
from outrider.deploy.distill.models import from_layers
from tests.unit.learning.tiny_learner import VOCAB, drafter


@pytest.fixture(scope="module")
def target():
    return drafter(layers=3).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def texts(target):
    """Return greedy answers of 12 tokens."""
    made = []
    for number, prompt in enumerate([[1, 2, 3], [4, 5], [9, 8, 7, 6]]):
        ids, top_ids, top_log_p = torch.tensor(prompt), [], []
        for _ in range(12):
            log_p = target(ids[None], use_cache=False).logits[0, -1].detach().log_softmax(-1)
            likely = log_p.topk(TOP)
            top_ids.append(likely.indices.int().numpy())
            top_log_p.append(likely.values.half().numpy())
            ids = torch.cat([ids, log_p.argmax()[None]])
        made.append(Text(number, 0, ids.int().numpy(), len(prompt), np.stack(top_ids), np.stack(top_log_p)))
    return made


def trainer(target, learning_rate=1e-3, named_ids=None):
    return Trainer(from_layers(target, [0, 2]), learning_rate, torch.float32, named_ids)


@pytest.mark.parametrize("named_ids", [None, torch.arange(0, VOCAB, 2)])
def test_steps_lower_the_loss_and_leave_the_head_alone(target, texts, named_ids):
    made = trainer(target, 3e-3, named_ids)
    frozen = [module.weight.clone() for module in (made.drafter.lm_head, made.drafter.model.embed_tokens)]
    losses = [made.step(number, 0.5, texts)[0] for number in range(25)]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    assert made.skipped == 0
    after = [module.weight for module in (made.drafter.lm_head, made.drafter.model.embed_tokens)]
    assert all(torch.equal(a, b) for a, b in zip(frozen, after, strict=True))


def test_a_step_without_a_finite_gradient_changes_nothing(target, texts):
    made = trainer(target)
    bad = dataclasses.replace(texts[0], top_log_p=np.full_like(texts[0].top_log_p, np.nan))
    before = {name: tensor.clone() for name, tensor in made.trained.items()}
    made.step(0, 0.5, [bad])
    assert made.skipped == 1
    assert all(torch.equal(before[name], tensor) for name, tensor in made.trained.items())
