"""Acceptance of look-ups, and of look-ups beside a draft model, along answers that the target has given.

Look-up drafters are the served ones' own strategies, told the text round by round; beside a draft model each round is
the one's that the served judge (drafter/several.py) chooses.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from outrider.actors.drafter.draft_model import verified
from outrider.actors.drafter.judge import MODEL, Judge, Offer
from outrider.actors.learning.rounds import ByMode, look_up
from outrider.cluster.config import ConfigError, NgramConfig, SpeculationConfig, SuffixConfig

LookUp = NgramConfig | SuffixConfig

BESIDE: dict[str, LookUp] = {"ngram": NgramConfig(method="ngram"), "suffix": SuffixConfig(method="suffix")}
"""As `drafter.beside` has them."""


def looked_up(texts: Sequence[tuple[list[int], list[int]]], config: LookUp, k: int) -> ByMode:
    """q of a look-up is one-hot, so a draft is accepted where the text has it, whatever the temperature. Every K is a
    deployment of its own, which reads the answers one after the other."""
    found = ByMode.up_to(k)
    for tally in found.tallies:
        propose_for = _strategy(config, tally.k)
        for handle, (prompt, answer) in enumerate(texts):
            with_end = propose_for(handle, prompt)
            tally.add(look_up(answer, with_end, tally.k))
            with_end([])
    return found


def together_with(
    texts: Sequence[tuple[list[int], list[int]]], model: ByMode, mode: str, beside: Sequence[str], seed: int
) -> ByMode:
    """Rounds of a draft model with look-ups beside it. model: alone, in that mode. Under rejection whether a token was
    the model's draft is drawn from the seed with the probability that it was."""
    longer = [(prompt, answer) for prompt, answer in texts if len(answer) > 1]
    found = ByMode.up_to(len(model.tallies))
    for tally in found.tallies:
        chance = random.Random(f"{seed}:{tally.k}")
        judge = Judge([MODEL, *beside])
        openers = {name: _strategy(BESIDE[name], tally.k) for name in beside}
        for handle, ((prompt, answer), moves_on) in enumerate(zip(longer, model.moves, strict=True)):
            agrees = [chance.random() < moved for moved in moves_on]
            look_ups = {name: opened(handle, prompt) for name, opened in openers.items()}
            tally.add(look_up(answer, Judged(judge, answer, agrees, look_ups, tally.k, mode != "rejection"), tally.k))
            for with_end in look_ups.values():
                with_end([])
        found.chosen = dict(judge.chosen)
    return found


class Judged:
    """Proposes along one answer as `several.SeveralStrategy` does where all of the model's drafts are at hand: none is
    waited for."""

    def __init__(
        self,
        judge: Judge,
        answer: Sequence[int],
        agrees: Sequence[bool],
        look_ups: dict[str, Callable[[Sequence[int]], list[int]]],
        k: int,
        free_of_rounds: bool,
    ) -> None:
        """agrees: whether the model's draft in the place of each token but the first is that token. look_ups: told what
        was committed, each gives what it would send. free_of_rounds: what the model would have drafted is known where
        it was not sent."""
        self._judge, self._answer, self._agrees, self._look_ups = judge, answer, agrees, look_ups
        self._k, self._free_of_rounds = k, free_of_rounds
        self._record = judge.record()
        self._offered: dict[str, list[int]] = {}
        self._at = 0

    def __call__(self, committed: Sequence[int]) -> list[int]:
        """committed: what was committed last. Returns the drafts of who is chosen."""
        self._at += len(committed)
        for name, drafts in self._offered.items():
            self._judge.verdict(self._record, name, *verified(drafts, committed))
        offered = {name: propose(committed) for name, propose in self._look_ups.items()}
        self._offered = {name: drafts for name, drafts in offered.items() if drafts}
        ahead = range(self._at, self._at + self._k)
        known = len(self._answer)
        model = [self._answer[at] if at < known and self._agrees[at - 1] else _ANOTHER for at in ahead]
        offers = [Offer(MODEL, self._k), *(Offer(name, len(drafts)) for name, drafts in self._offered.items())]
        chosen = self._judge.choose(self._record, offers).drafter
        sent = model if chosen == MODEL else self._offered[chosen]
        if chosen == MODEL or self._free_of_rounds:
            self._offered[MODEL] = model
        return sent


_ANOTHER = -1
"""In place of a draft that is not the text's token, whatever it would have been."""


def _strategy(config: LookUp, k: int) -> Callable[[int, list[int]], Callable[[Sequence[int]], list[int]]]:
    """What opens a sequence with its prompt. That gives what proposes; told no tokens, it closes the sequence."""
    from outrider.actors.drafter.load import load_strategy
    from outrider.cluster.link.messages import Commit, DraftSampling, Open

    strategy = load_strategy(config, SpeculationConfig(num_speculative_tokens=k), None, None)

    def work_off() -> None:
        while (work := strategy.plan()[0]) is not None:
            work.execute()
            strategy.complete(work)

    def open_sequence(handle: int, prompt: list[int]) -> Callable[[Sequence[int]], list[int]]:
        sequence = strategy.new_sequence((0, handle))
        sequence.add_prompt(Open(handle, len(prompt), 0, prompt, k, DraftSampling()))
        strategy.open(sequence)
        work_off()

        def propose(committed: Sequence[int]) -> list[int]:
            if not committed:
                strategy.close(sequence)
                work_off()
                return []
            answers = strategy.commit(sequence, Commit(handle, sequence.committed_len, list(committed), k, k))
            work_off()
            return list(answers[-1].proposals.token_ids)[:k]

        return propose

    return open_sequence


def look_up_of(drafter: Any) -> LookUp:
    """Raises ConfigError for a drafter that is no look-up."""
    if not isinstance(drafter, LookUp):
        method = getattr(drafter, "method", "none")
        raise ConfigError(
            f"--preset: its drafter is of method {method}, which drafts from inside the target; only draft_model, "
            "ngram and suffix can be measured without a server; use outrider bench"
        )
    return drafter
