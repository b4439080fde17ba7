"""MLP speculators and one-pass drafters: what they learn from, how they are measured, and what they become."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from outrider.actors.learning.draft_models import load
from outrider.actors.learning.texts import read_texts
from outrider.actors.vllm_adapter.offline_answers import TOGETHER, Answer
from outrider.cluster.config import ConfigError, parse_config
from outrider.cluster.link.messages import DraftSampling
from outrider.cluster.modes import Mode
from outrider.deploy.distill import mlp
from outrider.deploy.distill.measure import _loaded
from outrider.deploy.distill.models import from_layers, load_tokenizer
from outrider.deploy.distill.one_pass import OnePassTrainer, choose_mask_token
from outrider.deploy.distill.prompts import read_prompts
from outrider.deploy.distill.rounds import measured
from outrider.deploy.distill.run import Settings, distill
from outrider.deploy.distill.texts import TextStore, held_out, plan, texts_of
from outrider.deploy.models.check import check_models
from outrider.deploy.progress import Progress
from tests.support.models.tiny_models import VOCAB_SIZE, build_tiny_llama
from tests.unit.learning.test_train import target, texts  # noqa: F401 - fixtures
from tests.unit.learning.tiny_learner import VOCAB

pytestmark = pytest.mark.usefixtures("one_thread")
MASK, K = VOCAB - 2, 3


def mlp_trainer(target):  # noqa: F811
    config = mlp.config_of({"vocab_size": VOCAB, "hidden_size": 32}, K)
    return mlp.MLPTrainer(target, mlp.from_target(target, config, 0), 3e-3, torch.float32)


def one_pass_trainer(target):  # noqa: F811
    return OnePassTrainer(from_layers(target, [0, 2]), MASK, K, 3e-3, torch.float32)


@pytest.mark.parametrize("make", [mlp_trainer, one_pass_trainer])
def test_acceptance_rises_at_every_position(make, target, texts):  # noqa: F811
    made = make(target)
    before = measured(made, texts, K).tallies[-1]
    for number in range(100):
        made.step(number, 1.0, texts)
    after = measured(made, texts, K).tallies[-1]
    assert before.tokens_per_round < 2
    assert after.tokens_per_round > before.tokens_per_round + 1
    assert min(after.by_position) > 0.6, after.by_position
    assert made.skipped == 0


def test_a_speculator_is_measured_by_what_it_drafts(target, texts):  # noqa: F811
    made = mlp_trainer(target)
    for number in range(10):
        made.step(number, 1.0, texts)
    sampling = DraftSampling(Mode.GREEDY, 0.0)
    accepted = []
    for text, (same, _) in zip(texts, made.drafted(texts), strict=True):
        ids = torch.from_numpy(text.ids).long()
        with torch.no_grad():
            hidden = target.model(ids[None]).last_hidden_state[0]
        for start in range(1, len(same) - K):
            length = text.start + start
            (drafts,) = made._speculator.draft(
                hidden[length - 2][None], [int(ids[length - 1])], [sampling], [length], [K]
            )
            right = [drawn.token == int(token) for drawn, token in zip(drafts, ids[length:], strict=False)]
            accepted.append(int(np.cumprod(right).sum()))
            assert int(same[start].cumprod(0).sum()) == accepted[-1]
    assert len(set(accepted)) > 1, "all alike: says nothing"


def test_all_rounds_at_once_are_predicted_as_each_alone(target, texts):  # noqa: F811
    """Texts of different lengths, with the mask tokens of all rounds behind them, against a round's text and masks."""
    made = one_pass_trainer(target)
    for number in range(10):
        made.step(number, 1.0, texts)
    predicted = made._predictions(texts)
    rounds = [(text, start) for text in texts for start in range(len(text.ids) - text.start)]
    for hidden, start, ahead in zip(*predicted, strict=True):
        text, at = rounds[start]
        alone = torch.from_numpy(text.ids[: text.start + at]).long()
        alone = torch.cat([alone, torch.full((K - 1,), MASK)])
        with torch.no_grad():
            states = made.drafter.model(alone[None], use_cache=False).last_hidden_state[0]
        torch.testing.assert_close(hidden, states[text.start + at - 1 + int(ahead)], atol=1e-5, rtol=1e-4)
    assert len(predicted.starts) == len(texts) * (12 + 11 + 10)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return build_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def settings(tiny, tmp_path):
    """Settings of a run whose texts are there already, so that no engine starts."""
    data, model = tmp_path / "prompts.jsonl", load(tiny, torch.float32, "cpu")
    data.write_text("".join(json.dumps({"prompt": f"prompt {number}"}) + "\n" for number in range(8)))
    prompts = [list(f"prompt {number}".encode()) for number in range(8)]
    kept_out = held_out([prompt.digest for prompt in read_prompts(data).prompts])
    store = TextStore(tmp_path / "out" / "texts")
    for job in plan(8, kept_out, 1, TOGETHER, 0):
        asked = [prompts[index] for index in job.prompts]
        store.save(job, texts_of(job, asked, [answer(model, prompt) for prompt in asked]))
    return Settings(
        target=str(tiny), data=(data,), out=tmp_path / "out", kind="mlp", k=K, layers=None, start=None, steps=4,
        seq_len=64, answer_tokens=16, samples=1, chat=False, draft_vocab_size=None, learning_rate=1e-3, batch_size=4,
        seed=0, device="cpu", dtype="float32", bits=16,
    )  # fmt: skip


def answer(model, prompt):
    """Returns a greedy answer of 16 tokens."""
    with torch.no_grad():
        ids = model.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False)[0]
        likely = model(ids[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1).topk(32)
    return Answer(ids[len(prompt) :].tolist(), likely.indices.numpy(), likely.values.numpy())


def last_row(out):
    return json.loads((out / "progress.jsonl").read_text().splitlines()[-1])


def measured_again(target, checkpoint, out):  # noqa: F811
    """Measures a written checkpoint on the held-out texts, as `outrider acceptance` does."""
    held = [text for file in sorted((out / "texts").iterdir()) for text in read_texts(file) if text.held_out]
    return measured(_loaded(target, checkpoint, K, torch.float32, "cpu"), held, K)


def test_a_trained_speculator_is_served_for_its_target_alone(tiny, settings, tmp_path, outrider_home):
    made = distill(settings, Progress())
    section = {"method": "mlp_speculator", "model": str(made), "num_speculative_tokens": K}
    check_models(parse_config({"target": {"model": str(tiny)}, "drafter": section}))
    other = build_tiny_llama(tmp_path / "other", head_dim=64)
    with pytest.raises(ConfigError, match="was trained for tiny"):
        check_models(parse_config({"target": {"model": str(other)}, "drafter": section}))
    found, last = measured_again(tiny, made, settings.out), last_row(settings.out)
    assert found.overlap == pytest.approx(last["overlap"], abs=1e-5)
    assert found.tallies[-1].by_position == last["by_position"]
    with pytest.raises(ConfigError, match=r"--k: .*model has 3 heads"):
        _loaded(tiny, made, K + 1, torch.float32, "cpu")


def test_a_one_pass_drafter_names_its_mask_token_and_keeps_its_vocabulary(tiny, settings):
    made = distill(replace(settings, kind="one_pass", layers=1), Progress())
    document = json.loads((made / "config.json").read_text())
    assert (document["pard_token"], document["vocab_size"]) == (VOCAB_SIZE - 1, VOCAB_SIZE)
    found = measured_again(tiny, made, settings.out)
    assert found.overlap == pytest.approx(last_row(settings.out)["overlap"], abs=1e-5)


def test_the_mask_token_is_one_that_no_text_has(tiny, tmp_path, texts):  # noqa: F811
    assert choose_mask_token(tiny, VOCAB_SIZE, texts) == VOCAB_SIZE - 1, "an id without a token"
    with pytest.raises(ConfigError, match="no unused special token"):
        choose_mask_token(tiny, 257, texts)  # its end token alone is a special one
    more = shutil.copytree(tiny, tmp_path / "more")
    tokenizer = load_tokenizer(more)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<one>", "<two>"]})
    tokenizer.save_pretrained(more)
    assert choose_mask_token(more, 259, texts) == 258
    used = replace(texts[0], ids=np.array([258], np.int32))
    assert choose_mask_token(more, 259, [*texts, used]) == 257
