"""Versions of a learner on a tiny model: which one comes back, by itself or by hand, and from an earlier life."""

import pytest
import torch

from outrider.actors.learning.learner import Scores
from tests.unit.learning.tiny_learner import alike, experienced, learner, many, noise, plus, serve, work


def test_a_version_that_turns_out_worse_is_withdrawn():
    made = experienced()
    good, rows = made.serving, made.figures()["versions"]
    bad = noise(good.tensors)  # as if the gate had been wrong
    serve(made, bad)
    made._set(bad)
    made.compare()
    assert made.figures()["withdrawn"] == 0, "nothing has come since"
    made.add(many(200, first=2000))
    made.compare()
    assert made.figures()["withdrawn"] == 1
    assert made.serving.version.number == good.version.number + 2
    assert made._previous is None, "it is not to come back"
    assert alike(made.serving.tensors, good.tensors)
    made.compare()
    assert made.figures()["withdrawn"] == 1
    *_, bad, again = made.figures()["versions"]
    assert (bad["state"], again["state"], again["again"]) == ("withdrawn", "serves", good.version.number)
    assert bad["since"]["mean"] + bad["since"]["margin"] < 0
    assert again["verdict"] == rows[-1]["verdict"]


def test_a_version_is_withdrawn_where_there_is_no_time_to_train():
    made = experienced()
    good, steps = made.serving, made.figures()["steps"]
    serve(made, noise(good.tensors))
    assert not made.turn(may_train=False)
    assert made.figures()["withdrawn"] == 0, "nothing has come since"
    made.add(many(200, first=2000))
    assert not made.turn(may_train=False)
    assert made.figures()["withdrawn"] == 1
    assert alike(made.serving.tensors, good.tensors)
    assert made.figures()["steps"] == steps
    assert made.turn(may_train=True)


def test_versions_are_looked_at_again_only_when_texts_have_come():
    """Each look costs certainty."""
    made = learner()
    serve(made)
    made._scores = Scores(lambda tensors, texts: [0.5] * len(texts))
    for number in range(3):
        made.add(many(200, first=1000 * number))
        for _ in range(5):
            made.compare()
            made.turn(may_train=False)
    assert made._looks == 3
    serve(made)
    assert made._looks == 0


def test_a_resumed_version_that_is_worse_is_withdrawn():
    made = learner(model=experienced()._trainer.drafter)
    made.resume(7, {name: torch.zeros_like(tensor) for name, tensor in made.serving.tensors.items()})
    made.add(many(200, first=2000))
    made.compare()
    assert made.figures()["withdrawn"] == 1
    assert made.serving.version.number == 8
    assert any(bool(tensor.any()) for tensor in made.serving.tensors.values())


def test_an_earlier_life_s_version_serves_at_once():
    first = experienced()
    second = learner()
    second.resume(7, first.serving.tensors)
    assert second.serving.version.number == 7
    assert second.serving.version.learner != first.serving.version.learner
    assert alike(second.serving.tensors, first.serving.tensors)


def test_a_resumed_version_stands_after_the_drafter_as_it_was_loaded():
    made = learner()
    made.resume(7, plus(made.serving.tensors))
    assert [(row["number"], row["state"]) for row in made.figures()["versions"]] == [(0, "replaced"), (7, "serves")]
    assert made.go_back(0) == 8


def test_versions_get_numbers_above_what_is_on_disk():
    made = learner()
    made.count_from(50)
    assert made.serving.version.number == 0, "it is as it was loaded"
    made.add(many())
    work(made, 90)
    assert made.serving.version.number > 50


def test_a_former_version_serves_again_when_somebody_asks_for_it_and_what_led_away_is_forgotten():
    made = experienced()
    left = made.serving
    (first, *_) = [row["number"] for row in made.figures()["versions"] if row["number"]]
    assert first < left.version.number, made.figures()
    wanted = made._kept[first]
    serving = made.go_back(first)
    assert made.serving.version.number == serving == left.version.number + 1
    assert alike(made.serving.tensors, wanted)
    # Nothing is left of what was learned, so it is not learned again.
    assert not made.work()
    assert alike(made._trainer.trained, wanted)
    assert not made._trainer.optimizer.state
    made.compare()
    assert made.serving.version.number == serving, "neither by looking back nor by a comparison"
    rows = {row["number"]: row for row in made.figures()["versions"]}
    assert rows[left.version.number]["state"] == "reverted"
    assert (rows[serving]["state"], rows[serving]["again"]) == ("serves", first)
    assert made.figures()["reverted"] == 1
    # It learns from what comes now.
    made.add(many(400, first=5000))
    work(made, 60)
    assert made.serving.version.number > serving


@pytest.mark.parametrize("number", [0, 1])
def test_the_latest_versions_and_the_drafter_as_it_was_loaded_can_be_gone_back_to(number):
    made = learner(kept_versions=2)
    start = made.serving.tensors
    for _ in range(3):
        serve(made)
    kept = {row["number"]: row["kept"] for row in made.figures()["versions"]}
    assert kept == {0: True, 1: False, 2: True, 3: True}
    with pytest.raises(ValueError, match="3 serves; send one that does not"):
        made.go_back(3)
    if number:
        with pytest.raises(ValueError, match="1 is not kept; send one of 0, 2, 3"):
            made.go_back(number)
        return
    assert made.go_back(0) == 4
    assert made.serving.tensors is start
    with pytest.raises(ValueError, match="4 serves"):
        made.go_back(4)
    with pytest.raises(ValueError, match="0 serves"):
        made.go_back(0)


def test_who_goes_back_while_versions_are_compared_has_the_last_word(monkeypatch):
    made = experienced()
    left = made.serving.version.number
    learned = plus(made.serving.tensors)

    def acceptance(tensors, texts):
        if tensors is learned and made.serving.version.number == left:
            made.go_back(0)
        return [float(tensors is learned)] * len(texts)

    made._scores = Scores(acceptance)
    monkeypatch.setattr(made, "_rounded", lambda: learned)
    made.compare()
    assert made.serving.version.number == left + 1
    assert made.serving.tensors is made._started_from
    assert made.figures()["versions"][-1]["again"] == 0
