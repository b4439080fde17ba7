"""Sums up one run of one side, and computes what it could have given at best."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.bench.emulation.profiles import Profile
from tests.bench.emulation.rounds import RoundTimes
from tests.bench.emulation.step_time import StepTime
from tests.bench.emulation.text_process import Text


@dataclass(frozen=True)
class Side:
    """One way to serve a profile."""

    name: str
    drafter: StepTime | None
    accelerators: int
    hides_drafts: bool = False
    drafter_accelerators: int = 0
    """The drafter's accelerators, which several targets may share."""

    is_served: bool = False
    """Outrider serves it, over the network; else vLLM's engine in one process does."""

    sharded: bool = False
    """Whether the drafter is sharded over the target's accelerators."""

    one_pass: bool = False
    """Whether the drafter drafts all tokens in one pass."""

    def accelerators_of(self, targets: int) -> float:
        """For each of so many targets that share a drafter."""
        return self.accelerators - self.drafter_accelerators + self.drafter_accelerators / targets


def sides_of(profile: Profile) -> dict[str, Side]:
    """By name. in-process: the drafter as fast as on its own accelerator; in-process-tp: sharded like the target;
    in-process-one-pass: sharded too, with vLLM's parallel_drafting; outrider-one-pass: a one-pass drafter of its own;
    outrider-plain: served without a drafter."""
    own, drafters = profile.target_accelerators, profile.drafter_accelerators
    sides = (
        Side("plain", None, own),
        Side("in-process", profile.drafter, own),
        Side("in-process-tp", profile.drafter_in_process, own, sharded=True),
        Side("in-process-one-pass", profile.drafter_in_process, own, sharded=True, one_pass=True),
        Side("outrider", profile.drafter, own + drafters, True, drafters, True),
        Side("outrider-one-pass", profile.drafter, own + drafters, True, drafters, True, one_pass=True),
        Side("outrider-plain", None, own, is_served=True),
    )
    return {side.name: side for side in sides}


@dataclass(frozen=True)
class Ceiling:
    """tok/s of the batch when only devices take time, at one K, text and step times."""

    covered: float
    """On the side that hides drafts: with every outcome prepared for, which no run reaches. Else as expected."""

    expected: float
    """With as many outcomes prepared for as the text allows."""


@dataclass(frozen=True)
class Measurement:
    """One side at one batch and K. Times and speeds are those of the profile: the host's dilation is taken out."""

    side: str
    batch: int
    k: int
    """Tokens drafted a round at most; 0: no speculation."""

    accelerators: float
    """For one target, as its speed is: a drafter's are shared out among those that it drafts for."""

    ceiling: Ceiling
    times: RoundTimes
    reported: dict[str, int] = field(default_factory=dict)
    """The verifier's own counts of hits over the load, requests before and after the full batch included."""

    @property
    def tokens_per_s(self) -> float:
        return self.times.tokens / self.times.seconds

    @property
    def tokens_a_round(self) -> float:
        """Tokens that a round gives one request."""
        return self.times.tokens / self.times.rounds / self.batch


def ceiling(side: Side, target: StepTime, text: Text, batch: int, k: int) -> Ceiling:
    """Describes the work of one side. k: 0 for plain decoding."""
    if side.drafter is None or k == 0:
        plain = 1e3 * batch / target.step_ms(batch)
        return Ceiling(plain, plain)
    step, draft = target.step_ms(batch * (k + 1)), side.drafter
    tokens = 1e3 * batch * text.acceptance_length(k, side.one_pass)
    if side.one_pass:
        # In-process the pass also feeds the tokens that were verified, and waits for the target's step.
        rows = batch * (k + 1 if side.hides_drafts else 2 * k + 1)
        period = max(step, draft.step_ms(rows)) if side.hides_drafts else step + draft.step_ms(rows)
        return Ceiling(tokens / period, tokens / period)
    if not side.hides_drafts:
        # The first draft step also feeds the tokens that were verified, rejected ones masked.
        speed = tokens / (step + draft.step_ms(batch * (k + 2)) + (k - 1) * draft.step_ms(batch))
        return Ceiling(speed, speed)
    # One draft step more than K, for the guess at the bonus token.
    covered = tokens / max(step, (k + 1) * draft.step_ms(batch))
    return Ceiling(covered, max(_expected(target, draft, text, batch, k, others) for others in range(3)))


def _expected(target: StepTime, draft: StepTime, text: Text, batch: int, k: int, others: int) -> float:
    """tok/s with `others` alternatives drafted for at every position, whichever is better after a miss: that all wait
    for the drafter, or that the one decodes plainly for a round, in which the drafter covers its one open token.

    An alternative's rows run along on half the way on average. Misses are independent of each other. Never below plain
    decoding, which is a choice too.
    """
    hit, next_hit = text.coverage(k)[others], text.coverage(0)[others]
    drafts = (k + 1) * draft.step_ms(round(batch * (1 + others * (k + 1) / 2)))
    full = max(target.step_ms(batch * (k + 1)), drafts)
    all_hit = hit**batch
    waiting = max(
        1e3
        * batch
        * (hit * text.acceptance_length(k) + (1 - hit) * text.acceptance_length(late))
        / (full + (1 - all_hit) * late * draft.step_ms(batch))
        for late in range(1, k + 1)
    )
    drafting = next_hit / (1 - hit + next_hit) if next_hit else float(hit == 1.0)
    some = 1 - (1 - drafting) ** batch
    if not some:
        return max(waiting, 1e3 * batch / target.step_ms(batch))
    rows = round(batch * (1 + drafting * k / some))
    tokens = 1e3 * batch * (drafting * text.acceptance_length(k) + 1 - drafting)
    going_on = tokens / (some * max(target.step_ms(rows), drafts) + (1 - some) * target.step_ms(batch))
    return max(waiting, going_on, 1e3 * batch / target.step_ms(batch))


def table(measurements: list[Measurement]) -> str:
    """Markdown, one line a measurement."""
    columns = (
        "side", "batch", "K", "rounds", "tok/s", "per acc.", "ceiling: covered", "expected", "of expected",
        "tokens a round", "period ms", "target", "draft", "exposed", "sampling", "idle (p99)", "overhead (p99)",
        "on hits (p99)", "of it idle (p99)", "on misses (p99)", "main/side/miss/none %",
    )  # fmt: skip
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for m in measurements:
        t, speed = m.times, m.tokens_per_s
        middle = {name: f"{spread.median:.1f}" for name, spread in t.spreads.items()}
        both = {name: f"{spread.median:.1f} ({spread.p99:.1f})" for name, spread in t.spreads.items()}
        on, idle = (
            {name: f"{spread.median:.2f} ({spread.p99:.2f})" for name, spread in of.items()}
            for of in (t.overhead_by_origin, t.idle_by_origin)
        )
        told = sum(t.origins.values())
        cells: tuple[Any, ...] = (
            m.side, m.batch, m.k or "–", t.rounds, f"{speed:.1f}", f"{speed / m.accelerators:.1f}",
            f"{m.ceiling.covered:.1f}", f"{m.ceiling.expected:.1f}", f"{speed / m.ceiling.expected:.0%}",
            f"{m.tokens_a_round:.2f}", middle["period"], middle["target"], middle["draft"], middle["exposed"],
            middle["sampling"], both["idle"], both["overhead"],
            on.get("hit", "–"), idle.get("hit", "–"), on.get("miss", "–"),
            " / ".join(f"{100 * count / told:.0f}" for count in t.origins.values()) if told else "–",
        )  # fmt: skip
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(lines)
