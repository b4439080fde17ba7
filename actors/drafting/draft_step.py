"""One step of the draft model's: planned, run, and what it drew. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

from actors.drafting.engine import Engine
from actors.drafting.line import Drawn, Line
from actors.drafting.resident import Resident
from actors.drafting.step_plan import StepPlan


@dataclass(eq=False, slots=True)
class DraftStep:
    """A planned step. targets: of each row the sequence and line it extends; None for a prefill chunk."""

    is_step: ClassVar[bool] = True
    engine: Engine
    clock: Callable[[], float]
    plan: StepPlan = field(default_factory=StepPlan)
    targets: list[tuple[Resident, Line | None]] = field(default_factory=list)
    drawn: list[list[Drawn]] = field(default_factory=list)
    seconds: float = 0.0

    def execute(self) -> None:
        started = self.clock()
        self.drawn = self.engine.run(self.plan)
        self.seconds = self.clock() - started

    @property
    def num_fed(self) -> int:
        return sum(row.num_fed for row in self.plan.rows)
