"""Greedy tokens from another implementation (transformers, float32), and what to make of a difference."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

TIE = 1e-3
"""A top-two gap of logits below this is a tie: batch shapes round differently, either token is right."""


class Reference:
    def __init__(self, checkpoint: Path) -> None:
        self._checkpoint = checkpoint
        self._model = None
        self._answers: dict[tuple[int, ...], list[int]] = {}
        self.ties: list[str] = []

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """The answer's first num_tokens tokens, end tokens included like any other."""
        key = tuple(prompt)
        known = self._answers.get(key, [])
        if len(known) < num_tokens:
            known = self._answers[key] = self._generate(key, num_tokens)
        return known[:num_tokens]

    def gap(self, tokens: Sequence[int]) -> float:
        """Between the two largest logits after tokens."""
        with torch.inference_mode():
            logits = self._loaded()(torch.tensor([list(tokens)])).logits[0, -1]
        first, second = logits.topk(2).values.tolist()
        return first - second

    def behind_best(self, tokens: Sequence[int], token: int) -> float:
        """How far below the largest logit after tokens that of token is."""
        with torch.inference_mode():
            logits = self._loaded()(torch.tensor([list(tokens)])).logits[0, -1]
        return float(logits.max() - logits[token])

    def check(
        self, prompt: Sequence[int], answer: Sequence[int], expected: Sequence[int] | None = None, label: str = ""
    ) -> None:
        """Fail unless answer is expected, this reference's own greedy answer by default.

        A first difference at a tie is printed and counted, and what follows it is another text, not compared.
        """
        expected = self.greedy(prompt, len(answer)) if expected is None else expected
        for position, (found, wanted) in enumerate(zip(answer, expected, strict=False)):
            if found != wanted:
                gap = self.gap([*prompt, *answer[:position]])
                assert gap < TIE, f"{label}: token {position} is {found}, not {wanted}, and no tie (gap {gap:.3g})"
                self.ties.append(f"{label}: near-tie at token {position}, gap {gap:.2g}")
                print(self.ties[-1])
                return
        assert len(answer) == len(expected), f"{label}: {len(answer)} tokens, not {len(expected)}"

    def _generate(self, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
        model, tokens, past = self._loaded(), list(prompt), None
        fed = torch.tensor([tokens])
        with torch.inference_mode():
            for _ in range(num_tokens):
                output = model(fed, past_key_values=past, use_cache=True)
                past = output.past_key_values
                tokens.append(int(output.logits[0, -1].argmax()))
                fed = torch.tensor([tokens[-1:]])
        return tokens[len(prompt) :]

    def _loaded(self):  # type: ignore[no-untyped-def]
        if self._model is None:
            from transformers import AutoModelForCausalLM

            torch.set_num_threads(1)
            self._model = AutoModelForCausalLM.from_pretrained(self._checkpoint, dtype=torch.float32).eval()
        return self._model
