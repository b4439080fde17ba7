"""Counts rounds and keeps their times, for the verifier.

A round is one target step that commits tokens. Its time runs from the start of that step to the start of the next and
splits into the target's work (forward pass and verification), the drafter's work as the drafter reports it, and the
rest: scheduling, messages and waiting that no model work fills.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from outrider.actors.observability.histogram import Histogram, HistogramSnapshot
from outrider.cluster.link.messages import DraftOrigin

_WINDOW = 512
_PARTS = ("period", "target", "draft", "wait")


@dataclass
class RoundStatistics:
    """Counts by request: a step that serves three requests is three rounds."""

    rounds: int = 0
    drafted_rounds: int = 0
    """Rounds in which at least one draft was verified."""

    drafted: int = 0
    accepted: int = 0
    late_rounds: int = 0
    """Rounds that decoded plainly because their proposals came after the deadline."""

    proposals: int = 0
    """Proposals with drafts that arrived, prefetched ones included."""

    proposal_bytes: int = 0
    """Bytes of the frames that carried proposals, headers included."""

    main_line_hits: int = 0
    """Commits whose outcome the main line had: all drafts accepted, and the bonus token guessed."""

    side_branch_hits: int = 0
    misses: int = 0
    foreseen: int = 0
    """Hits whose drafts came by a prefetched proposal, so that the drafter was not asked."""

    path_rounds: int = 0
    """Rounds that verified further paths beside the main line."""

    path_rows: int = 0
    path_tokens: int = 0
    """Tokens committed beyond those of the main line."""

    draft_step_ms: float = 0.0
    """A step of the drafter, as it last reported."""

    _times_ms: deque[tuple[float, ...]] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    _histograms: dict[str, Histogram] = field(default_factory=lambda: {part: Histogram() for part in _PARTS})

    def count(self, num_drafts: int, num_committed: int) -> None:
        """Counts one request's round: num_drafts verified, num_committed tokens, of which the last was not drafted."""
        self.rounds += 1
        if num_drafts:
            self.drafted_rounds += 1
            self.drafted += num_drafts
            self.accepted += num_committed - 1

    def count_paths(self, num_paths: int, gained: int) -> None:
        """Counts the further paths of one request's round, and the tokens that they brought."""
        self.path_rounds += 1
        self.path_rows += num_paths
        self.path_tokens += gained

    def count_frame(self, num_proposals: int, nbytes: int) -> None:
        """Counts a frame with num_proposals proposals that hold drafts."""
        self.proposals += num_proposals
        if num_proposals:
            self.proposal_bytes += nbytes

    def count_answer(self, origin: DraftOrigin, step_us: int) -> None:
        self.main_line_hits += origin is DraftOrigin.MAIN_LINE
        self.side_branch_hits += origin is DraftOrigin.SIDE_BRANCH
        self.misses += origin is DraftOrigin.MISS
        if step_us:
            self.draft_step_ms = step_us / 1e3

    def add_times(self, period_s: float, target_s: float, draft_s: float, wait_s: float) -> None:
        """Adds the time of one step's rounds.

        Args:
            wait_s: of the engine for proposals, which includes the draft unless it was drafted ahead.
        """
        for part, seconds in zip(_PARTS, (period_s, target_s, draft_s, wait_s), strict=True):
            self._histograms[part].observe(seconds)
        parts_s = (period_s, target_s, draft_s, wait_s, period_s - target_s - draft_s)
        self._times_ms.append(tuple(seconds * 1e3 for seconds in parts_s))

    def counts(self) -> dict[str, int]:
        """Returns every count by its field's name."""
        return {name: count for name, count in vars(self).items() if isinstance(count, int)}

    def histograms(self) -> dict[str, HistogramSnapshot]:
        """Returns ``period``, ``target``, ``draft`` and ``wait`` of all rounds, in seconds."""
        return {part: histogram.snapshot() for part, histogram in self._histograms.items()}

    def snapshot(self) -> dict[str, Any]:
        """Returns the public API's RoundStatistics by field. Times are medians over the last steps."""
        names = [f"{part}_ms" for part in (*_PARTS, "other")]
        columns = zip(*self._times_ms, strict=True)  # none before the first round
        medians = {name: median(column) for name, column in zip(names, columns, strict=False)}
        return {
            **self.counts(),
            "mean_acceptance_length": 1.0 + self.accepted / self.drafted_rounds if self.drafted_rounds else 1.0,
            "acceptance_rate": self.accepted / self.drafted if self.drafted else 0.0,
            "draft_step_ms": self.draft_step_ms,
            **({"median": {**medians, "samples": len(self._times_ms)}} if medians else {}),
        }
