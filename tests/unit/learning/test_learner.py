"""Learning on a tiny model: what is better serves, and nothing else ever does; what turns out worse goes."""

import copy
import dataclasses

import numpy as np
import pytest
import torch

from outrider.actors.learning.learner import BATCH_SIZE, PASSES
from tests.unit.learning.tiny_learner import (
    TRAINED,
    VOCAB,
    acceptance,
    alike,
    experienced,
    half,
    learner,
    many,
    noise,
    plus,
    serve,
    work,
)

pytestmark = pytest.mark.timeout(300)  # it trains


@pytest.mark.parametrize("greedy", [True, False])
def test_what_is_learned_serves_once_it_is_better(greedy):
    made = learner()
    assert made.serving.number == 0
    made.add(many(greedy=greedy))
    start = {name: tensor.clone() for name, tensor in made.serving.tensors.items()}
    work(made, 100)
    figures = made.figures()
    assert figures["version"] == figures["adopted"] >= 1
    assert figures["versions"][-1]["verdict"]["recent"]["mean"] > 0
    unseen = many(40, first=5000, greedy=greedy)
    assert acceptance(made, made.serving.tensors, unseen) > acceptance(made, start, unseen) + 0.1
    assert "model.embed_tokens.weight" not in start
    assert "lm_head.weight" not in start


def test_each_text_has_its_turns_and_then_the_trainer_waits():
    made = learner()
    assert not made.work()
    made.add([dataclasses.replace(one, prompt=TRAINED) for one in many(20)])
    done = 0
    while made.work():
        done += 1
    assert done == PASSES * 20 / BATCH_SIZE


def test_too_few_held_out_texts_decide_nothing():
    made = learner(held_out=0.5)
    made.add([dataclasses.replace(one, prompt=TRAINED) for one in many(60)])
    made.add([dataclasses.replace(one, prompt=0) for one in many(60, first=500)])  # parts of one answer are one text
    work(made, 25)
    assert made.figures()["refused"] == {"no_texts": 1}
    assert (made.figures()["last_verdict"]["recent"]["texts"], made.figures()["held_out"]) == (1, 60)
    assert made.serving.number == 0


@pytest.mark.parametrize("poison", ["noise", "shuffled", "not_finite", "another_target"])
def test_what_was_poisoned_never_serves_and_is_forgotten(poison):
    made = experienced()
    good = made.serving
    foreign = experienced(many(rule=11)).serving.tensors if poison == "another_target" else {}
    with torch.no_grad():
        for name, parameter in made._trainer.trained.items():
            if foreign:
                parameter.copy_(foreign[name])
            elif poison == "noise":
                parameter += torch.randn_like(parameter)
            elif poison == "shuffled":
                parameter.copy_(parameter.flatten()[torch.randperm(parameter.numel())].view_as(parameter))
            elif name.endswith("q_proj.weight"):
                parameter[0, 0] = float("nan")
    made.compare()
    assert made.serving is good
    assert sum(made.figures()["refused"].values()) >= 1
    assert not made._trainer.optimizer.state, "what the optimizer remembers led there"
    assert alike(made._trainer.trained, good.tensors), "training goes on from what serves"


def test_labels_that_are_noise_are_not_learned():
    """Held-out texts are of the same stream: on noise nothing is better than anything."""
    made = learner()
    chance = np.random.default_rng(0)
    wrong = []
    for one in many():
        top = chance.permuted(np.tile(np.arange(VOCAB, dtype=np.int32), (len(one.top_ids), 1)), axis=1)[:, :2]
        wrong.append(dataclasses.replace(one, ids=np.concatenate([one.ids[: one.start], top[:, 0]]), top_ids=top))
    made.add(wrong)
    work(made, 125)
    assert sum(made.figures()["refused"].values()) >= 3, made.figures()


def test_a_shift_is_followed_and_what_came_before_is_not_forgotten():
    made = learner()
    made.add(many(400, rule=5))
    work(made, 125)
    made.add(many(400, rule=11, first=1000))
    number, before = made.serving.number, made.serving.tensors
    work(made, 250)
    assert made.serving.number > number
    old, new = many(40, rule=5, first=5000), many(40, rule=11, first=6000)
    assert acceptance(made, made.serving.tensors, new) > acceptance(made, before, new) + 0.1
    assert acceptance(made, made.serving.tensors, old) > acceptance(made, before, old) - 0.05


def test_what_the_traffic_does_not_hold_is_kept_by_general_texts():
    """A drafter that knows what follows the lower tokens meets traffic of the higher ones only."""
    first = learner()
    first.add([half(one, 0) for one in many()])
    work(first, 125)
    known = [half(one, 0) for one in many(200, first=8000, greedy=False)]
    unseen = [half(one, 0) for one in many(40, first=5000, greedy=False)]

    def after(general):
        made = learner(general=general, model=copy.deepcopy(first._trainer.drafter))
        start = made.serving.tensors
        made.add([half(one, 31) for one in many(first=1000)])
        work(made, 250)
        assert made.serving.number >= 1, made.figures()
        return acceptance(made, made.serving.tensors, unseen) - acceptance(made, start, unseen)

    with_them, without = after(known), after([])
    assert with_them > -0.02
    assert without < with_them - 0.05, "it forgets"


def test_a_version_that_turns_out_worse_is_withdrawn():
    made = experienced()
    good = made.serving
    bad = noise(good.tensors)  # as if the gate had been wrong
    serve(made, bad)
    made.compare()
    assert made.figures()["withdrawn"] == 0, "nothing has come since"
    made.add(many(200, first=2000))
    made.compare()
    assert made.figures()["withdrawn"] == 1
    *_, bad, again = made.figures()["versions"][: good.number + 3]
    assert (bad["number"], again["number"], again["again"]) == (good.number + 1, good.number + 2, good.number)
    assert bad["state"].endswith("WITHDRAWN")
    assert bad["since"]["mean"] + bad["since"]["margin"] < 0
    serving = made.serving.tensors
    assert acceptance(made, serving, many(40, first=9000)) >= acceptance(made, good.tensors, many(40, first=9000))


def test_a_resumed_version_serves_at_once_and_is_withdrawn_where_it_is_worse():
    first = experienced()
    made = learner(model=first._trainer.drafter)
    start = made.serving.tensors
    made.resume(7, {name: torch.zeros_like(tensor) for name, tensor in start.items()})
    assert (made.serving.number, made.figures()["versions"][0]["number"]) == (7, 0)
    assert made.id != first.id
    made.add(many(200, first=2000))
    made.compare()
    assert made.figures()["withdrawn"] == 1
    assert made.serving.number == 8
    assert alike(made.serving.tensors, start)


def test_an_operator_goes_back_and_what_led_away_is_forgotten():
    made = experienced()
    serve(made)
    left, wanted = made.serving.number, made._previous
    assert made.go_back(wanted.number) == made.serving.number == left + 1
    assert alike(made.serving.tensors, wanted.tensors)
    assert not made.work(), "nothing is left of what was learned, so it is not learned again"
    assert alike(made._trainer.trained, wanted.tensors)
    assert not made._trainer.optimizer.state
    made.compare()
    assert made.serving.number == left + 1, "neither by looking back nor by a comparison"
    *_, before, now = made.figures()["versions"]
    assert before["state"].endswith("REVERTED")
    assert (now["number"], now["again"]) == (left + 1, wanted.number)
    assert made.figures()["reverted"] == 1


def test_the_latest_versions_and_the_drafter_as_it_was_loaded_can_be_gone_back_to():
    made = learner()
    start = made.serving.tensors
    for _ in range(4):
        serve(made)
    assert {row["number"]: row["kept"] for row in made.figures()["versions"]} == {
        0: True, 1: False, 2: True, 3: True, 4: True,
    }  # fmt: skip
    with pytest.raises(ValueError, match="4 serves; send one that does not"):
        made.go_back(4)
    with pytest.raises(ValueError, match="1 is not kept; send one of 0, 2, 3, 4"):
        made.go_back(1)
    assert made.go_back(0) == 5
    assert made.serving.tensors is start
    with pytest.raises(ValueError, match="0 serves"):
        made.go_back(0)


def test_who_goes_back_while_versions_are_compared_has_the_last_word(monkeypatch):
    made = experienced()
    left = made.serving.number
    learned = plus(made.serving.tensors)

    def scores(version, texts):
        if version.tensors is learned and made.serving.number == left:
            made.go_back(0)
        return [float(version.tensors is learned)] * len(texts)

    monkeypatch.setattr(made, "_scores", scores)
    monkeypatch.setattr(made, "_rounded", lambda: learned)
    made.compare()
    assert made.serving.number == left + 1
    assert made.serving.tensors is made._loaded.tensors
