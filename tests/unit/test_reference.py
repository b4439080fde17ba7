"""What the engine tests are judged by must itself tell right from wrong, at ties and after them too."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tests.support.models.reference import Reference

V = 6


class TableModel:
    """Logits after a token are a row of its own; row 1 has its two best all but equal."""

    rows = torch.full((V, V), -1.0)
    rows[0, 1] = rows[2, 3] = rows[3, 4] = rows[4, 5] = rows[5, 0] = 1.0
    rows[1, 2], rows[1, 4] = 1.0, 1.0 - 1e-4
    rows[1, 5] = 1.0 - 1e-2

    def __call__(self, texts: Tensor, past_key_values: object = None, use_cache: bool = False) -> SimpleNamespace:
        return SimpleNamespace(logits=self.rows[texts], past_key_values=None)


@pytest.fixture
def reference() -> Reference:
    made = Reference(Path("unused"))
    made._model = TableModel()
    return made


RIGHT = [1, 2, 3, 4, 5, 0, 1, 2]
OTHER = [1, 4, 5, 0, 1, 2, 3, 4]
"""What follows when the tie at token 1 falls the other way."""


def test_its_own_answer_is_right(reference: Reference) -> None:
    assert reference.greedy([0], 8) == RIGHT
    reference.check([0], RIGHT)
    assert reference.ties == []


def test_either_token_of_a_tie_is_right_and_its_place_counted(reference: Reference) -> None:
    reference.check([0], OTHER)
    assert len(reference.ties) == 1
    twice = [1, 4, 5, 0, 1, 4, 5, 0]
    reference.check([0], twice, RIGHT)
    assert len(reference.ties) == 2, "the first of the two is known already"


@pytest.mark.parametrize("token", [0, 1, 3, 5])
def test_a_tie_is_no_excuse_for_a_third_token(reference: Reference, token: int) -> None:
    with pytest.raises(AssertionError, match=f"token 1 is {token}, not 2"):
        reference.check([0], [1, token, *RIGHT[2:]])


@pytest.mark.parametrize("position", range(2, 8))
def test_what_follows_a_tie_is_compared_too(reference: Reference, position: int) -> None:
    wrong = list(OTHER)
    wrong[position] = 3 if OTHER[position] != 3 else 0
    with pytest.raises(AssertionError, match=f"token {position} is"):
        reference.check([0], wrong)


@pytest.mark.parametrize("answer", [RIGHT[:-1], [*RIGHT, 3]], ids=["short", "long"])
def test_an_answer_of_another_length_is_wrong(reference: Reference, answer: list[int]) -> None:
    with pytest.raises(AssertionError, match="tokens, not 8"):
        reference.check([0], answer, RIGHT)
