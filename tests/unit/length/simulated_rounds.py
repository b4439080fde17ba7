"""A target and a drafter that are numbers: rounds to teach a controller with, and the rates that any lengths give."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from actors.length.length_controller import LengthController
from actors.length.limits import LengthLimits, Lengths
from actors.length.origin import Origin


@dataclass
class Deployment:
    """acceptance: of each request, by position, [K]. main, side: share of answers drafted ahead. late_s: what every
    answer takes on top of the model."""

    step_s: Callable[[float], float]
    draft_step_s: float
    acceptance: dict[str, Sequence[float]]
    main: float = 0.64
    side: float = 0.27
    late_s: float = 0.0
    noise: float = 0.02
    plain: tuple[str, ...] = ()

    @property
    def members(self) -> list[str]:
        return [*self.acceptance, *self.plain]

    def wait_s(self, origin: Origin, lengths: Lengths, step_s: float) -> float:
        if not lengths.k:
            return 0.0
        if origin is Origin.MISS:
            return lengths.k_miss * self.draft_step_s + self.late_s * (lengths.k_miss > 0)
        steps = lengths.k + (origin is Origin.MAIN_LINE)
        return max(0.0, steps * self.draft_step_s - step_s) + self.late_s

    def expected_tokens(self, request_id: str, length: int) -> float:
        total = survives = 1.0
        for a in self.acceptance[request_id][:length]:
            survives *= a
            total += survives
        return total

    def expected_rate(self, chosen: Mapping[str, Lengths]) -> tuple[float, float]:
        """Mean tokens and mean seconds of a round with these lengths."""
        hit = self.main + self.side
        tokens, scheduled = float(len(self.plain)), float(len(self.plain))
        for request_id in self.acceptance:
            lengths = chosen[request_id]
            tokens += hit * self.expected_tokens(request_id, lengths.k)
            tokens += (1 - hit) * self.expected_tokens(request_id, lengths.k_miss)
            scheduled += 1 + hit * lengths.k + (1 - hit) * lengths.k_miss
        step_s = self.step_s(scheduled)
        origins = ((Origin.MAIN_LINE, self.main), (Origin.SIDE_BRANCH, self.side), (Origin.MISS, 1 - hit))
        waits = [[(self.wait_s(o, chosen[i], step_s), share) for o, share in origins] for i in self.acceptance]
        # Mean of the longest, from its distribution function.
        levels = sorted({wait for row in waits for wait, _ in row})
        mean_s, below, before = 0.0, 0.0, 0.0
        for level in levels:
            mean_s += (1 - below) * (level - before)
            below = 1.0
            for row in waits:
                below *= sum(share for wait, share in row if wait <= level)
            before = level
        return tokens, step_s + mean_s

    def best_fixed(self, max_tokens: int) -> tuple[float, Lengths]:
        """Highest rate of one k and one k_miss for all, tried one by one; 0 and 0 among them."""
        rates = []
        for k in range(max_tokens + 1):
            for k_miss in range(k + 1):
                tokens, seconds = self.expected_rate(dict.fromkeys(self.acceptance, Lengths(k, k_miss)))
                rates.append((tokens / seconds, Lengths(k, k_miss)))
        return max(rates, key=lambda pair: pair[0])

    def plain_rate(self) -> float:
        return len(self.members) / self.step_s(len(self.members))


@dataclass
class Simulation:
    """Rounds of a controller on a deployment, which may be changed between runs."""

    deployment: Deployment
    limits: LengthLimits
    seed: int = 1
    history: list[dict[str, Lengths]] = field(default_factory=list)
    measured_tokens: float = 0.0
    measured_s: float = 0.0

    def __post_init__(self) -> None:
        self.controller = LengthController(self.limits)
        self._random = random.Random(self.seed)
        self._drafting: set[str] = set()
        for request_id in self.deployment.acceptance:
            self.controller.track(request_id, self.limits.max_tokens)

    def run(self, rounds: int) -> float:
        """Mean tokens a second that the lengths of these rounds give in this deployment; no luck in it."""
        tokens = seconds = 0.0
        for _ in range(rounds):
            chosen = self.round()
            mean_tokens, mean_s = self.deployment.expected_rate(chosen)
            tokens += mean_tokens
            seconds += mean_s
        return tokens / seconds

    def round(self) -> dict[str, Lengths]:
        deployment, members = self.deployment, self.deployment.members
        chosen = self.controller.choose(members)
        self.history.append(chosen)
        came, origins, scheduled = {}, {}, len(members)
        for request_id in deployment.acceptance:
            lengths, origin = chosen[request_id], Origin.MISS
            if request_id in self._drafting:
                draw = self._random.random()
                ahead = draw < deployment.main + deployment.side
                origin = (
                    Origin.MISS if not ahead else Origin.MAIN_LINE if draw < deployment.main else Origin.SIDE_BRANCH
                )
            origins[request_id] = origin
            came[request_id] = lengths.k if origin.is_hit else lengths.k_miss
            scheduled += came[request_id]
        step_s = deployment.step_s(scheduled) * self._random.gauss(1.0, deployment.noise)
        wait_s = max((deployment.wait_s(origins[i], chosen[i], step_s) for i in origins), default=0.0)
        for request_id, origin in origins.items():
            self.controller.observe_answer(request_id, origin, came[request_id], deployment.draft_step_s, wait_s)
            accepted = 0
            for a in deployment.acceptance[request_id][: came[request_id]]:
                if self._random.random() >= a:
                    break
                accepted += 1
            self.controller.observe_round(request_id, came[request_id], accepted)
            self.measured_tokens += 1 + accepted
        self._drafting = {request_id for request_id in origins if chosen[request_id].k}
        self.controller.observe_step(len(members), scheduled, step_s)
        self.measured_s += step_s + wait_s
        return chosen


def same(count: int, *acceptance: float) -> dict[str, Sequence[float]]:
    """count requests alike, with 8 positions; the last acceptance given holds from there on."""
    by_position = [acceptance[min(j, len(acceptance) - 1)] for j in range(8)]
    return {f"r{i}": by_position for i in range(count)}


def cpu(tokens: float) -> float:
    """A 1.5B model on one core."""
    return 0.104 + 0.005 * tokens


def gpu(tokens: float) -> float:
    return 0.025 + 0.0001 * tokens


def compute_bound(tokens: float) -> float:
    """Flat up to 64 tokens, steep from there on."""
    return 0.025 + 0.0001 * tokens + 0.0006 * max(0.0, tokens - 64)
