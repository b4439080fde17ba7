"""Both spellings of a bad word are banned."""

from __future__ import annotations

import pytest

from outrider.actors.vllm_adapter.input_parameters import banned_sequences


class Tokenizer:
    def __init__(self, vocabulary: dict[str, list[int]]) -> None:
        self._vocabulary = vocabulary

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return self._vocabulary[text]


SPELLINGS = {
    "one token after a space, two without": ([1, 2], [3], [[1, 2], [3]]),
    "as many tokens": ([1, 2], [3, 2], [[1, 2], [3, 2]]),
    "the same tokens": ([1], [1], [[1]]),
    "the space is a token": ([1, 2], [9, 1, 2], [[1, 2]]),
    "nothing without the space": ([], [3], [[3]]),
}


@pytest.mark.parametrize(("alone", "after_space", "banned"), SPELLINGS.values(), ids=SPELLINGS)
def test_a_word_is_banned_at_the_start_and_after_a_space(alone, after_space, banned):
    assert banned_sequences([" word"], Tokenizer({"word": alone, " word": after_space})) == banned
