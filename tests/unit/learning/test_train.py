"""A training step on tiny models, and the draft vocabulary."""

import dataclasses
import random
from collections import Counter

import pytest
import torch

from outrider.actors.learning import train
from outrider.actors.learning.draft_models import freeze
from outrider.actors.learning.text import TOP, Text
from outrider.actors.learning.train import Recipe, Trainer, alike, draft_vocabulary
from outrider.deploy.distill.models import from_layers
from tests.unit.learning.tiny_learner import END, VOCAB, drafter


@pytest.fixture(scope="module")
def target():
    return drafter(layers=3).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def texts(target):
    """Greedy answers of 12 tokens."""
    made = []
    for number, prompt in enumerate([[1, 2, 3], [4, 5], [9, 8, 7, 6]]):
        ids, tops = torch.tensor(prompt), []
        for _ in range(12):
            log_p = target(ids[None], use_cache=False).logits[0, -1].detach().log_softmax(-1)
            tops.append(log_p.topk(TOP))
            ids = torch.cat([ids, log_p.argmax()[None]])
        made.append(
            Text(number, 0, ids, len(prompt), torch.stack([i for _, i in tops]), torch.stack([p for p, _ in tops]))
        )
    return made


@pytest.mark.parametrize("number", [8, 20, 200])
def test_a_batch_is_of_one_length_nearly_and_all_texts_are_as_likely(number):
    lengths = torch.randperm(number, generator=torch.Generator().manual_seed(1)) + 5
    texts = [Text(i, 0, torch.zeros(int(n)), 0, torch.zeros(0), torch.zeros(0)) for i, n in enumerate(lengths)]
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
        made = trainer(target, recipe=Recipe(own_share=0.0))
        for number in range(3):
            made.step(number, 1.0, texts)
        weights.append(torch.cat([tensor.detach().flatten() for tensor in made.trained.values()]))
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-4, atol=1e-5)


def trainer(target, **changes):
    drafter = from_layers(target, [0, 2])
    settings = {"recipe": Recipe(), "dtype": torch.float32, "named_ids": None, **changes}
    return Trainer(drafter, target, freeze(drafter, torch.float32), **settings)


@pytest.mark.parametrize("own_share", [0.0, 1.0])
@pytest.mark.parametrize("named_ids", [None, torch.arange(0, VOCAB, 2)])
def test_steps_lower_the_loss_and_leave_the_head_alone(target, texts, own_share, named_ids):
    made = trainer(target, recipe=Recipe(own_share=own_share, learning_rate=3e-3), named_ids=named_ids)
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
    named = len(torch.cat([text.top_ids.flatten() for text in few]).unique())
    overlap = {}
    for sampled in (8, VOCAB):
        monkeypatch.setattr(train, "SAMPLED_IDS", sampled)
        made = trainer(target, recipe=Recipe(own_share=0.0, learning_rate=3e-3))
        for number in range(40):
            made.step(number, 0.5, few)
        assert set(sizes) == {named + 8 if sampled == 8 else VOCAB}
        sizes.clear()
        overlap[sampled] = made.evaluate(few).overlap
        sizes.clear()
        monkeypatch.setattr(train, "SAMPLED_IDS", 8)
        made.step(40, 0.5, [dataclasses.replace(few[0], top_ids=few[0].top_ids + VOCAB)])  # of a larger vocabulary
        assert set(sizes) == {8}
        sizes.clear()
    assert overlap[8] > 0.9 * overlap[VOCAB] > 0.3


@pytest.mark.parametrize("own_share", [0.0, 1.0])
def test_what_the_target_will_say_of_the_drafters_own_tokens_is_not_named_yet(target, texts, monkeypatch, own_share):
    made, named_by = trainer(target, recipe=Recipe(own_share=own_share)), []
    draft_ids = made._draft_ids
    monkeypatch.setattr(made, "_draft_ids", lambda *asked: named_by.append(asked[0]) or draft_ids(*asked))
    made.step(0, 0.5, texts)
    [answers] = named_by
    assert answers is None if own_share else len(answers) == len(texts)


def test_bfloat16_is_for_processors_that_have_it(monkeypatch):
    assert train.fastest_dtype("cuda") is torch.bfloat16
    for known, dtype in (({"avx512_bf16": True}, torch.bfloat16), ({"avx512_bf16": False}, torch.float32)):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda known=known: known)
        assert train.fastest_dtype("cpu") is dtype


def test_a_drafter_that_is_the_target_has_every_draft_accepted(target, texts):
    drafter = from_layers(target, [0, 1, 2])
    made = Trainer(drafter, target, freeze(drafter, torch.float32), Recipe(), torch.float32, None)
    held = made.evaluate(texts)
    assert held.tally.by_position == [1.0, 1.0, 1.0]
    assert held.tally.tokens_per_round == pytest.approx(4.0)
    assert held.overlap == pytest.approx(1.0, abs=1e-3)
    # And on its own tokens the two agree, so that every context is reached.
    assert made.step(0, 0.5, texts)[0] == pytest.approx(0.0, abs=1e-3)


def test_a_step_without_a_finite_gradient_changes_nothing(target, texts):
    made = trainer(target)
    bad = dataclasses.replace(texts[0], top_log_p=torch.full_like(texts[0].top_log_p, float("nan")))
    before = {name: tensor.clone() for name, tensor in made.trained.items()}
    made.step(0, 0.5, [bad])
    assert made.skipped == 1
    assert all(torch.equal(before[name], tensor) for name, tensor in made.trained.items())


def test_the_draft_vocabulary_is_what_the_target_expects_and_the_end(texts):
    chosen = draft_vocabulary(texts, 10, VOCAB, {END})
    assert len(chosen) == 10
    assert chosen.tolist() == sorted(chosen.tolist())
    assert END in chosen.tolist()
    likeliest = torch.cat([text.top_ids[:, 0] for text in texts]).mode().values
    assert int(likeliest) in chosen.tolist()
