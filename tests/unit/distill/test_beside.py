"""`outrider acceptance` with look-ups beside a draft model: each alone, and each round by whoever the judge takes."""

import json
import random

import pytest

from outrider.actors.drafter.judge import MODEL, Judge
from outrider.actors.learning.rounds import ByMode
from outrider.deploy import cli
from outrider.deploy.distill.look_ups import BESIDE, Judged, looked_up, together_with
from tests.tiny_models import build_tiny_llama

K = 3
LOOP = list(range(10, 17))


def together(texts, model, mode, seed=0):
    return together_with(texts, model, mode, ("ngram",), seed)


def fresh(count, seed):
    chance = random.Random(seed)
    return [chance.randrange(1000, 100_000) for _ in range(count)]


def alone(texts, moves):
    found = ByMode.up_to(K)
    for (_, answer), moved in zip(texts, moves, strict=True):
        assert len(moved) == len(answer) - 1
        found.walk(moved, moved)
    return found


def rates(found):
    return [tally.tokens_per_round for tally in found.tallies]


@pytest.mark.parametrize("mode", ["greedy", "rejection"])
def test_where_only_one_is_ever_right_it_is_the_one(mode):
    texts = [(LOOP * 3, (LOOP * 20)[:120]) for _ in range(3)]
    model = alone(texts, [[0.0] * 119] * 3)
    both = together(texts, model, mode)
    one = looked_up(texts, BESIDE["ngram"], K)
    assert rates(one)[-1] > 3.9
    assert all(ours > 0.95 * its for ours, its in zip(rates(both), rates(one), strict=True))
    assert both.chosen["ngram"] > 20 * both.chosen[MODEL]

    texts = [(fresh(20, seed), fresh(120, seed + 50)) for seed in range(3)]
    model = alone(texts, [[1.0] * 119] * 3)
    both = together(texts, model, mode)
    assert rates(both) == rates(model) == [2.0, 3.0, 4.0]
    assert both.chosen["ngram"] == 0


def test_where_they_take_turns_both_together_are_better_than_either():
    """Half of each text repeats the prompt, and is nothing to the model; the other half is the model's."""
    texts, moves = [], []
    for seed in range(6):
        prompt, new = fresh(60, seed), fresh(60, seed + 50)
        texts.append((prompt, new + prompt))
        moves.append([1.0] * 59 + [0.0] * 60)
    model = alone(texts, moves)
    both, one = together(texts, model, "greedy"), looked_up(texts, BESIDE["ngram"], K)
    for ours, *each in zip(rates(both), rates(model), rates(one), strict=True):
        assert ours > 1.15 * max(each)
    assert all(count > 20 for count in both.chosen.values())
    # Of those that it proposes the look-up has nearly all accepted, and the model half: neither is its worth.
    assert one.tallies[-1].acceptance_rate > 0.9
    assert one.tallies[-1].proposed_per_round < 2
    assert both.tallies[-1].acceptance_rate < one.tallies[-1].acceptance_rate


def test_under_rejection_a_token_was_the_models_draft_as_often_as_is_likely():
    texts = [(fresh(20, seed), fresh(400, seed + 50)) for seed in range(8)]
    model = alone(texts, [[0.6] * 399] * 8)
    both = together(texts, model, "rejection")
    assert rates(both) == pytest.approx(rates(model), rel=0.05)
    assert rates(both) == rates(together(texts, model, "rejection")), "the same by seed"
    assert rates(both) != rates(together(texts, model, "rejection", seed=1))


@pytest.mark.parametrize("free_of_rounds", [True, False])
def test_a_model_that_was_not_sent_is_judged_where_its_drafts_are_known(free_of_rounds):
    judge = Judge([MODEL, "ngram"])
    judge.verdict(judge.record(), "ngram", 500, 500)
    judge.verdict(judge.record(), MODEL, 0, 500)
    counted = dict(judge.judged)
    answer = [1, 2, 3, 4, 5, 6]
    propose = Judged(judge, answer, [True] * 5, {"ngram": lambda committed: [2, 9, 9]}, K, free_of_rounds)
    assert propose([1]) == [2, 9, 9]
    propose([2, 3])
    assert judge.judged["ngram"] - counted["ngram"] == 2, "up to the first that was wrong"
    assert judge.judged[MODEL] - counted[MODEL] == (2 if free_of_rounds else 0)
    assert judge.right[MODEL] == (2 if free_of_rounds else 0)


def test_a_preset_s_look_ups_are_measured_beside_its_model(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("outrider.deploy.distill.memory.keep_large_blocks", lambda: True)
    target = build_tiny_llama(tmp_path / "tiny")
    drafter = build_tiny_llama(tmp_path / "drafter", noise_of=target, noise=0.02)
    preset = tmp_path / "preset.yaml"
    section = {"method": "draft_model", "model": str(drafter), "beside": ["ngram", "suffix"]}
    speculation = {"num_speculative_tokens": K}
    preset.write_text(json.dumps({"target": {"model": str(target)}, "drafter": section, "speculation": speculation}))
    (tmp_path / "prompts.txt").write_text("one and one and one\ntwo and two and two\nthree\n")
    command = ["acceptance", "--preset", str(preset), "--dataset", str(tmp_path / "prompts.txt"), "--dtype", "float32"]
    out = tmp_path / "out.json"
    assert cli.main([*command, "--temperature", "0.8", "--max-tokens", "40", "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["drafter"]["beside"] == ["ngram", "suffix"]
    assert report["modes"].keys() == report["together"].keys() == {"greedy", "rejection", "coupled"}
    assert report["look_ups"].keys() == {"ngram", "suffix"}
    assert report["look_ups"]["ngram"].keys() == {"greedy", "sampled"}
    for found in report["together"].values():
        assert [row["k"] for row in found["by_k"]] == [1, 2, 3]
        assert found["chosen"].keys() == {"draft_model", "ngram", "suffix"}
        for row in found["by_k"]:
            shares = row["accepted_per_round"], row["acceptance_rate"] * row["proposed_per_round"]
            assert shares[0] == pytest.approx(shares[1])
    shown = capsys.readouterr().out
    assert "accepted drafts a round, and of those proposed, K = 1, 2, 3" in shown
    assert sum(line.startswith("  together") for line in shown.splitlines()) == 3
