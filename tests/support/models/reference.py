"""The tokens that greedy and coupled sampling must give, from another implementation (transformers, float32), and what
to make of a difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from outrider.actors.verification.noise import gumbel

TIE = 1e-3
"""Tokens whose scores (logits, noise included) are this close to the best are tied with it: batch shapes round
differently, each of them is right."""

TOP_P_TIE = 1e-5
"""A token whose place is this close to where top_p ends may be taken in or left out."""


@dataclass(frozen=True)
class Greedy:
    def options(self) -> dict[str, float]:
        """The client's options that ask for this choice."""
        return {"temperature": 0.0}

    def scores(self, logits: Tensor, position: int, slack: float = 0.0) -> Tensor:
        """The chosen token has the largest. logits: float32 [V]; position: of the token chosen; slack: by how much
        more, or less, is let in than top_p says."""
        return logits


@dataclass(frozen=True)
class Coupled:
    """argmax of log p plus the request's own Gumbel noise (Daliri et al. 2024), constraints spelled out with a sort."""

    seed: int
    temperature: float = 1.0
    top_p: float = 1.0

    def options(self) -> dict[str, float]:
        return {"temperature": self.temperature, "top_p": self.top_p, "seed": self.seed}

    def scores(self, logits: Tensor, position: int, slack: float = 0.0) -> Tensor:
        size = len(logits)
        noise = gumbel(torch.full((size,), self.seed), torch.full((size,), position), torch.arange(size))
        scores = logits.double() / self.temperature + noise
        if self.top_p == 1.0:
            return scores
        return scores.masked_fill(
            self._before(logits) >= max(self.top_p + slack, torch.finfo(torch.float32).tiny), -torch.inf
        )

    def _before(self, logits: Tensor) -> Tensor:
        """float64 [V]: the probability of all tokens likelier than each. Equals stand or fall together."""
        probs = (logits.double() / self.temperature).softmax(-1)
        return torch.stack([probs[logits > logit].sum() for logit in logits])


GREEDY = Greedy()
Choice = Greedy | Coupled


class Reference:
    def __init__(self, checkpoint: Path) -> None:
        self._checkpoint = checkpoint
        self._model = None
        self._answers: dict[tuple[Choice, tuple[int, ...]], list[int]] = {}
        self._ties: dict[tuple[Choice, tuple[int, ...]], str] = {}
        """By place: the text so far, and what was to be chosen there."""

    @property
    def ties(self) -> list[str]:
        """One for each place: the same answer asked for again is no further evidence."""
        return list(self._ties.values())

    @property
    def vocab_size(self) -> int:
        return int(self._loaded().config.vocab_size)

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        return self.answer(prompt, num_tokens, GREEDY)

    def answer(self, prompt: Sequence[int], num_tokens: int, choice: Choice) -> list[int]:
        """Return the answer's first num_tokens tokens, end tokens included like any other."""
        key = (choice, tuple(prompt))
        known = self._answers.get(key, [])
        if len(known) < num_tokens:
            known = self._answers[key] = self._generate(tuple(prompt), num_tokens, choice)
        return known[:num_tokens]

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """float32 [V] after tokens."""
        return self.logits_along(torch.tensor([list(tokens)]))[0, -1]

    def logits_along(self, texts: Tensor) -> Tensor:
        """float32 [N, L, V] after every token of int64 [N, L]."""
        with torch.inference_mode():
            logits: Tensor = self._loaded()(texts).logits
        return logits

    def tied(self, tokens: Sequence[int], choice: Choice = GREEDY) -> list[int]:
        """Return the tokens that rounding may make the choice after tokens, most often one."""
        logits = self.logits(tokens)
        best = choice.scores(logits, len(tokens), -TOP_P_TIE).max()
        return (choice.scores(logits, len(tokens), TOP_P_TIE) > best - TIE).nonzero().flatten().tolist()

    def outside_top(self, prompt: Sequence[int], answer: Sequence[int], count: int) -> list[int]:
        """Positions in answer of tokens that are none of the count likeliest there: in one pass over the text."""
        logits = self.logits_along(torch.tensor([[*prompt, *answer]]))[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor([list(answer)]).T).squeeze(1)
        return (chosen < logits.topk(count).values[:, -1] - TIE).nonzero().flatten().tolist()

    def check(
        self,
        prompt: Sequence[int],
        answer: Sequence[int],
        expected: Sequence[int] | None = None,
        label: str = "",
        choice: Choice = GREEDY,
    ) -> None:
        """Fail unless answer is expected, this reference's own by default.

        A difference is right only if both tokens are tied there. It is printed, its place counted once, and the rest of
        the answer is compared with what this reference gives after the token that was found.
        """
        expected = list(self.answer(prompt, len(answer), choice) if expected is None else expected)
        for position, found in enumerate(answer[: len(expected)]):
            if found != (wanted := expected[position]):
                so_far = [*prompt, *answer[:position]]
                tied = self.tied(so_far, choice)
                assert {found, wanted} <= set(tied), f"{label}: token {position} is {found}, not {wanted}; tied: {tied}"
                said = f"{label}: near-tie of {found} and {wanted} at token {position}"
                self._ties.setdefault((choice, tuple(so_far)), said)
                print(said)
                rest = len(answer) - position - 1
                expected[position:] = [found, *self.answer([*so_far, found], rest, choice)]
        assert len(answer) == len(expected), f"{label}: {len(answer)} tokens, not {len(expected)}"

    def _generate(self, prompt: tuple[int, ...], num_tokens: int, choice: Choice) -> list[int]:
        model, tokens, past = self._loaded(), list(prompt), None
        fed = torch.tensor([tokens])
        with torch.inference_mode():
            for _ in range(num_tokens):
                output = model(fed, past_key_values=past, use_cache=True)
                past = output.past_key_values
                tokens.append(int(choice.scores(output.logits[0, -1], len(tokens)).argmax()))
                fed = torch.tensor([tokens[-1:]])
        return tokens[len(prompt) :]

    def _loaded(self):  # type: ignore[no-untyped-def]
        if self._model is None:
            from transformers import AutoModelForCausalLM

            torch.set_num_threads(1)
            self._model = AutoModelForCausalLM.from_pretrained(self._checkpoint, dtype=torch.float32).eval()
        return self._model
