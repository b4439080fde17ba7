"""Rounds along texts that the target wrote itself, and the draft vocabulary of such texts."""

import numpy as np
import pytest
import torch

from outrider.actors.learning.train import Trainer
from outrider.deploy.distill.models import draft_vocabulary, from_layers
from outrider.deploy.distill.rounds import Tally, measured
from tests.unit.learning.test_train import target, texts  # noqa: F401 - fixtures
from tests.unit.learning.tiny_learner import END, VOCAB


def test_greedy_rounds_are_walked_as_they_would_run():
    # Drafts that would match: round 1 accepts two and is rejected at the third; the next starts behind that token.
    tally = Tally(3)
    matches = [1, 1, 0, 1, 0, 1, 1, 1, 0, 0, 0]
    tally.add([matches[start : start + 3] for start in range(11)])
    # Starts at 0 (2 accepted), 3 (1), 5 (3, and the bonus token at 8); 9 and 10 have no room for a whole round.
    assert (tally.rounds, tally.reached, tally.accepted) == (3, [3, 3, 2], [3, 2, 1])
    assert tally.tokens_per_round == pytest.approx(3)
    assert tally.acceptance_rate == pytest.approx(6 / 9)
    tally.add([[1, 1], [1]])  # too short for a round
    assert tally.by_position == [1.0, 2 / 3, 0.5]


def test_a_drafter_that_is_the_target_has_every_draft_accepted(target, texts):  # noqa: F811
    found = measured(Trainer(from_layers(target, [0, 1, 2]), 0.0, torch.float32), texts, 3)
    assert found.tallies[-1].by_position == [1.0, 1.0, 1.0]
    assert found.tallies[-1].tokens_per_round == pytest.approx(4.0)
    assert found.overlap == pytest.approx(1.0, abs=1e-3)
    assert found.tokens == 36


def test_the_draft_vocabulary_is_what_the_target_expects_and_the_end(texts):  # noqa: F811
    chosen = draft_vocabulary(texts, 10, VOCAB, {END})
    assert len(chosen) == 10
    assert chosen.tolist() == sorted(chosen.tolist())
    assert END in chosen.tolist()
    likeliest = np.bincount(np.concatenate([text.top_ids[:, 0] for text in texts])).argmax()
    assert int(likeliest) in chosen.tolist()
