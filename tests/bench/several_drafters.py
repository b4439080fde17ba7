"""What look-ups beside a draft model earn, on texts of five kinds, in tokens a second at emulated step times.

    python -m tests.bench.several_drafters --answers 24

Look-ups, the draft model's policy and the choice among them are the served ones, on a clock that is told what steps
take; what the model says is played: right as often as the kind of text has it. One request at a time. Prints two
tables, of tokens a second and of tokens a round.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from outrider.actors.drafter.draft_model import DraftModelProposer
from outrider.actors.drafter.engine import Drawn
from outrider.actors.drafter.lookup_drafters import MODEL, LookupDrafters
from outrider.actors.drafter.ngram import NgramProposer
from outrider.actors.drafter.planner import LookaheadLimits
from outrider.actors.drafter.proposer import Proposer, Work
from outrider.actors.drafter.suffix import SuffixProposer
from outrider.actors.drafter.suffix_index import SuffixLimits
from outrider.cluster.link.messages import Commit, DraftSampling, ProposalStatus
from tests.unit.drafter.drive import Drive
from tests.unit.drafting_engine import MemoryEngine, lookahead

VOCAB = 2000
K = 4


@dataclass(frozen=True)
class Times:
    """Seconds. The defaults: a 70B target in bfloat16 on four GPUs and an 8B drafter (docs/performance.md)."""

    target_s: float = 0.0242
    draft_s: float = 0.006
    wire_s: float = 0.0006


RIGHT = {"easy": 0.85, "middling": 0.6, "edits": 0.35, "agents": 0.35, "hopeless": 0.1}
"""Kind of text -> how often the draft model is right."""


class Texts:
    """Prompts and what the target answers, token by token, with how often the draft model is right."""

    def __init__(self, kind: str, seed: int = 0, num_tokens: int = 160) -> None:
        self._chance, self.kind, self._length = random.Random(f"{kind} {seed}"), kind, num_tokens
        self._templates = [self._fresh(60) for _ in range(6)]
        self.right = RIGHT[kind]

    def _fresh(self, count: int) -> list[int]:
        return [self._chance.randrange(10, VOCAB) for _ in range(count)]

    def one(self) -> tuple[list[int], list[int]]:
        """edits: the prompt's own text again, with changes. agents: steps that other answers have taken too, in another
        order, with changes. The others: nothing in it was there before."""
        chance = self._chance
        if self.kind == "edits":
            prompt = self._fresh(self._length)
            return prompt, self._changed(prompt, 0.06)
        if self.kind != "agents":
            return self._fresh(40), self._fresh(self._length)
        steps = [token for template in chance.sample(self._templates, 3) for token in template]
        return self._fresh(40), self._changed(steps[: self._length], 0.04)

    def _changed(self, tokens: list[int], share: float) -> list[int]:
        changed: list[int] = []
        for token in tokens:
            changed += self._fresh(self._chance.randrange(1, 4)) if self._chance.random() < share else [token]
        return changed[: self._length]


class PlayedEngine(MemoryEngine):
    """Draws what the target says next, as often as it is to be right; text off the answer's path is answered with
    anything."""

    def __init__(self, takes: Callable[[], None]) -> None:
        """takes: lets a step's time go by."""
        super().__init__(num_blocks=4000, max_model_len=1000)
        self._takes = takes
        self.truth: list[int] = []
        self.right = 0.0

    def run(self, plan):  # type: ignore[no-untyped-def]
        self._takes()
        return super().run(plan)

    def _drawn(self, row, draw, end):  # type: ignore[no-untyped-def]
        start = max(end - 16, 0)  # what is committed is the truth: off its path are the last few at most
        text = [self._slot(row, position) for position in range(start, end)]
        chance = random.Random(hash(tuple(text[-8:])))
        known = end < len(self.truth) and text == self.truth[start:end]
        token = self.truth[end] if known and chance.random() < self.right else chance.randrange(10, VOCAB)
        return Drawn(token, confidence=self.right)


def proposer_of(
    only: str | None, clock: Callable[[], float], engine: PlayedEngine, limits: LookaheadLimits | None = None
) -> Proposer[Any]:
    lookups: dict[str, Proposer[Any]] = {
        "ngram": NgramProposer(2, 4),
        "suffix": SuffixProposer(SuffixLimits(24, 1.0, 0.1), 1000, 100_000),
    }
    if only in lookups:
        return lookups[only]
    model = DraftModelProposer(engine, 128, limits or lookahead(), clock=clock)
    return LookupDrafters(model, {} if only == MODEL else lookups, clock)


class Play:
    """Requests, one after the other, through a proposer."""

    def __init__(
        self,
        only: str | None,
        times: Times,
        sampling: DraftSampling | None = None,
        limits: LookaheadLimits | None = None,
    ) -> None:
        """only: the drafter of every round; None: the rule chooses. sampling: None: greedy."""
        self.now, self._times, self._sampling = 0.0, times, sampling
        self.rounds = 0
        self._engine = PlayedEngine(self._step)
        self.proposer = proposer_of(only, lambda: self.now, self._engine, limits)
        self._drive = Drive(self.proposer)
        self._requests = 0
        self._under_way: tuple[Work, float] | None = None
        """And when it ends."""

    def answer(self, prompt: list[int], answer: list[int], right: float) -> float:
        """Seconds. right: how often the model is."""
        self._requests += 1
        key, truth = (1, self._requests), prompt + answer
        self._engine.truth, self._engine.right = truth, right
        self._drive.open(key, prompt, K, self._sampling)
        while self._work() is not None:
            pass
        began, at, drafts = self.now, len(prompt), []
        while at < len(truth):
            same = 0
            while same < len(drafts) and at + same < len(truth) and drafts[same] == truth[at + same]:
                same += 1
            self._verify()
            self.rounds += 1
            committed = truth[at : at + same + 1]
            commit = Commit(key[1], at, committed, K, 2)
            at += len(committed)
            answers = self._drive.commit(key, commit)
            while not answers and (more := self._work()) is not None:
                answers = more
            drafts = next((told.token_ids for told in answers if told.status is ProposalStatus.OK), [])
        self._drive.close(key)
        return self.now - began

    def _step(self) -> None:
        self.now += self._times.draft_s

    def _verify(self) -> None:
        """The drafter goes on meanwhile."""
        until = self.now + self._times.target_s + self._times.wire_s
        while self._work(until) is not None:
            pass
        self.now = until

    def _work(self, until: float = math.inf):  # type: ignore[no-untyped-def]
        """Answers of a piece of work; None: there is none, or it ends after `until`, and is under way from now on."""
        if self._under_way is None:
            work, answers = self._drive.plan()
            if work is None:
                return answers or None
            assert not answers
            began = self.now
            work.execute()
            self._under_way, self.now = (work, self.now), began
        work, ends = self._under_way
        if ends > until:
            return None
        self.now, self._under_way = max(self.now, ends), None
        return self._drive.complete(work)


KINDS = tuple(RIGHT)
CHOICES = (None, MODEL, "ngram", "suffix")


class Earned(NamedTuple):
    """Counts tokens."""

    a_second: float
    a_round: float


def earned(only: str | None, kinds: tuple[str, ...], num_answers: int, times: Times, seed: int = 0) -> Earned:
    """Answers of each kind, mixed: one of each in turn."""
    play, sources = Play(only, times), [Texts(kind, seed) for kind in kinds]
    tokens = seconds = 0.0
    for _ in range(num_answers):
        for source in sources:
            prompt, answer = source.one()
            seconds += play.answer(prompt, answer, source.right)
            tokens += len(answer)
    return Earned(tokens / seconds, tokens / play.rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=24, help="of each kind")
    parser.add_argument("--seed", type=int, default=0)
    for name, value in vars(Times()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=value)
    args = parser.parse_args()
    times = Times(args.target_s, args.draft_s, args.wire_s)
    tables: tuple[list[str], list[str]] = ([], [])
    for kinds in (*((kind,) for kind in KINDS), KINDS):
        found = {only: earned(only, kinds, args.answers, times, args.seed) for only in CHOICES}
        for table, by in zip(tables, zip(*found.values(), strict=True), strict=True):
            rates = " | ".join(f"{rate:.1f}" if table is tables[0] else f"{rate:.2f}" for rate in by)
            name = "all, in turn" if len(kinds) > 1 else f"{kinds[0]} ({RIGHT[kinds[0]]})"
            table.append(f"| {name} | {rates} | {by[0] / max(by[1:]):.3f} |")
    for unit, table in zip(("second", "round"), tables, strict=True):
        names = " | ".join(name or "selected" for name in CHOICES)
        print(f"| tokens a {unit} | {names} | selected over the best |\n|---|{'---|' * len(CHOICES)}---|")
        print("\n".join(table))


if __name__ == "__main__":
    main()
