"""What one run of one side gave, and what it could have given at best."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.bench.emulation.profiles import Profile
from tests.bench.emulation.round_times import RoundTimes
from tests.bench.emulation.step_time import StepTime
from tests.bench.emulation.text_process import TextProcess


@dataclass(frozen=True)
class Side:
    """One way to serve a profile."""

    name: str
    drafter: StepTime | None
    accelerators: int
    hides_drafts: bool = False


def sides_of(profile: Profile) -> dict[str, Side]:
    """By name. in-process: the drafter as fast as on its own accelerator; in-process-tp: sharded like the target."""
    own = profile.target_accelerators
    sides = (
        Side("plain", None, own),
        Side("in-process", profile.drafter, own),
        Side("in-process-tp", profile.drafter_in_process, own),
        Side("outrider", profile.drafter, own + profile.drafter_accelerators, hides_drafts=True),
    )
    return {side.name: side for side in sides}


@dataclass(frozen=True)
class Measurement:
    """One side at one batch and K. Times and speeds are those of the profile: the host's dilation is taken out."""

    side: str
    batch: int
    k: int
    """Tokens drafted a round at most; 0: no speculation."""

    tokens: int
    seconds: float
    accelerators: int
    acceptance_length: float
    bound: float
    """tok/s without any host work, and on the side that hides drafts with every outcome prepared for."""

    times: RoundTimes
    hits: dict[str, int] = field(default_factory=dict)
    """The verifier's counts of main-line hits, side-branch hits and misses, where it keeps them."""

    reported: dict[str, float] = field(default_factory=dict)
    """The verifier's own medians of a round's time, in milliseconds, over its last 512 steps: a short load's hold steps
    of the one before it. Its target and draft times are the models' with the host's work around each forward pass."""

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def bound(side: Side, target: StepTime, text: TextProcess, batch: int, k: int) -> float:
    """tok/s of the batch when only accelerators take time."""
    step_ms = target.step_ms(batch * (k + 1))
    if side.drafter is None or k == 0:
        return 1e3 * batch / target.step_ms(batch)
    if side.hides_drafts:
        # One draft step more than K, for the guess at the bonus token.
        step_ms = max(step_ms, (k + 1) * side.drafter.step_ms(batch))
    else:
        # The first draft step also feeds the tokens that were verified, rejected ones masked.
        step_ms += side.drafter.step_ms(batch * (k + 2)) + (k - 1) * side.drafter.step_ms(batch)
    return 1e3 * batch * text.acceptance_length(k) / step_ms


def table(measurements: list[Measurement]) -> str:
    """Markdown, one line a measurement."""
    columns = (
        "side", "batch", "K", "tok/s", "per acc.", "bound", "tokens a round", "period ms", "target", "draft", "exposed",
        "idle (p99)", "overhead (p99)", "hits main/side/miss",
    )  # fmt: skip
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for m in measurements:
        t = m.times
        cells: tuple[Any, ...] = (
            m.side, m.batch, m.k or "–", f"{m.tokens_per_s:.1f}", f"{m.tokens_per_s / m.accelerators:.1f}",
            f"{m.bound:.1f}", f"{m.acceptance_length:.2f}", f"{t.period.median:.1f}", f"{t.target.median:.1f}",
            f"{t.draft.median:.1f}", f"{t.exposed_draft.median:.1f}", f"{t.idle.median:.1f} ({t.idle.p99:.1f})",
            f"{t.overhead.median:.1f} ({t.overhead.p99:.1f})",
            " / ".join(f"{count}" for count in m.hits.values()) or "–",
        )  # fmt: skip
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(lines)
