"""A training step on tiny models, and the draft vocabulary."""

import dataclasses
import random
from collections import Counter

import numpy as np
import pytest
import torch

from outrider.actors.learning import train
from outrider.actors.learning.texts import TOP, Text
from outrider.actors.learning.train import Trainer
from outrider.deploy.distill.models import draft_vocabulary, from_layers
from outrider.deploy.distill.rounds import measured
from outrider.deploy.distill.texts import alike
from tests.unit.learning.tiny_learner import END, VOCAB, drafter


@pytest.fixture(scope="module")
def target():
    return drafter(layers=3).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def texts(target):
    """Greedy answers of 12 tokens."""
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


@pytest.mark.parametrize("number", [8, 20, 200])
def test_a_batch_is_of_one_length_nearly_and_all_texts_are_as_likely(number):
    lengths = torch.randperm(number, generator=torch.Generator().manual_seed(1)) + 5
    texts = [Text(i, 0, np.zeros(int(n)), 0, np.zeros(0), np.zeros(0)) for i, n in enumerate(lengths)]
    chance, drawn, spans = random.Random(0), Counter(), []
    for _ in range(4000):
        batch = alike(texts, 8, chance)
        assert len({text.prompt for text in batch}) == 8
        drawn.update(text.prompt for text in batch)
        spans.append(max(len(text.ids) for text in batch) - min(len(text.ids) for text in batch))
    expected = 4000 * 8 / number
    assert all(abs(drawn[index] - expected) < 6 * expected**0.5 for index in range(number))
    if number == 200:
        assert sum(spans) / len(spans) < number / 6


def test_what_a_step_is_filled_up_with_changes_nothing(target, texts, monkeypatch):
    weights = []
    for width, positions in ((1, 1), (32, 64)):
        monkeypatch.setattr(train, "_WIDTH", width)
        monkeypatch.setattr(train, "_POSITIONS", positions)
        made = trainer(target)
        for number in range(3):
            made.step(number, 1.0, texts)
        weights.append(torch.cat([tensor.detach().flatten() for tensor in made.trained.values()]))
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-4, atol=1e-5)


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


def test_without_a_draft_vocabulary_a_step_looks_at_what_its_texts_name_and_a_sample(target, texts, monkeypatch):
    """Which stands for the rest: it learns as much as with the whole head, and the rest is left alone as well."""
    sizes = []
    original = train.head

    def counted(hidden, weight, ids):
        sizes.append(len(weight) if ids is None else len(ids))
        return original(hidden, weight, ids)

    monkeypatch.setattr(train, "head", counted)
    few = [dataclasses.replace(text, top_ids=text.top_ids[:, :2], top_log_p=text.top_log_p[:, :2]) for text in texts]
    named = len(np.unique(np.concatenate([text.top_ids.ravel() for text in few])))
    overlap = {}
    for sampled in (8, VOCAB):
        monkeypatch.setattr(train, "SAMPLED_IDS", sampled)
        made = trainer(target, 3e-3)
        for number in range(40):
            made.step(number, 0.5, few)
        assert set(sizes) == {named + 8 if sampled == 8 else VOCAB}
        sizes.clear()
        overlap[sampled] = measured(made, few, 3).overlap
        sizes.clear()
        monkeypatch.setattr(train, "SAMPLED_IDS", 8)
        made.step(40, 0.5, [dataclasses.replace(few[0], top_ids=few[0].top_ids + VOCAB)])  # of a larger vocabulary
        assert set(sizes) == {8}
        sizes.clear()
    assert overlap[8] > 0.9 * overlap[VOCAB] > 0.3


def test_bfloat16_is_for_processors_that_have_it(monkeypatch):
    assert train.fastest_dtype("cuda") is torch.bfloat16
    for known, dtype in (({"avx512_bf16": True}, torch.bfloat16), ({"avx512_bf16": False}, torch.float32)):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda known=known: known)
        assert train.fastest_dtype("cpu") is dtype


def test_a_step_without_a_finite_gradient_changes_nothing(target, texts):
    made = trainer(target)
    bad = dataclasses.replace(texts[0], top_log_p=np.full_like(texts[0].top_log_p, np.nan))
    before = {name: tensor.clone() for name, tensor in made.trained.items()}
    made.step(0, 0.5, [bad])
    assert made.skipped == 1
    assert all(torch.equal(before[name], tensor) for name, tensor in made.trained.items())


def test_the_draft_vocabulary_is_what_the_target_expects_and_the_end(texts):
    chosen = draft_vocabulary(texts, 10, VOCAB, {END})
    assert len(chosen) == 10
    assert chosen.tolist() == sorted(chosen.tolist())
    assert END in chosen.tolist()
    likeliest = np.bincount(np.concatenate([text.top_ids[:, 0] for text in texts])).argmax()
    assert int(likeliest) in chosen.tolist()
