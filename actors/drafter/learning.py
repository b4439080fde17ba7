"""A drafter's side of learning: it hands over what it was taught, and takes the version that is to serve.

The trainer is an actor that all drafters of an application with the same model share (actors/learning/service.py). A
drafter follows it whatever it holds itself: a trainer that began anew serves the drafter as it was loaded until it has
something better, so every version that drafts has been through the gate of the trainer that is there.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import ray

from outrider.actors.drafter.draft_model import DraftModelStrategy
from outrider.actors.drafter.loop import DraftLoop
from outrider.actors.learning.lessons import Taught
from outrider.actors.learning.service import DrafterTrainer, Update
from outrider.actors.learning.versions import sampled_digest
from outrider.actors.shared_actor import Member, SharedActor, get_or_create
from outrider.cluster.config import DraftModelConfig

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 600.0
"""A trainer loads the draft model before it answers."""

FETCH_TIMEOUT_S = 120.0
"""For the tensors of a version, which may lie on another node."""


class Teacher(Protocol):
    """The trainer as a drafter sees it; may raise whatever a call to another process raises."""

    def exchange(
        self, held: tuple[str, int] | None, taught: list[Taught], drafter: str, idle_s: float | None
    ) -> Update:
        """See DrafterTrainer.exchange."""

    def fetch(self, update: Update) -> Mapping[str, Tensor]:
        """The version's tensors, by the checkpoint's names."""

    def go_back(self, number: int) -> tuple[int | None, str]:
        """See DrafterTrainer.go_back."""


class RayTeacher:
    def __init__(self, app_name: str, config: DraftModelConfig) -> None:
        learn = config.learn
        assert learn is not None
        # Another model, or other settings, are another trainer's: one of an application before this may still be there.
        local = Path(config.model).expanduser()
        checkpoint = sampled_digest(local) if local.is_dir() else config.revision
        told = json.dumps([config.model, checkpoint, learn.model_dump()], sort_keys=True)
        name = f"Trainer:{app_name}:{hashlib.sha256(told.encode()).hexdigest()[:8]}"
        options: dict[str, Any] = {"num_cpus": learn.num_cpus, "num_gpus": learn.num_gpus, "max_concurrency": 8}
        self._actor = SharedActor(
            lambda: get_or_create(DrafterTrainer, name, config.model, config.revision, learn, **options),
            start_timeout_s=START_TIMEOUT_S,
        )

    def exchange(
        self, held: tuple[str, int] | None, taught: list[Taught], drafter: str, idle_s: float | None
    ) -> Update:
        """See SharedActor.call."""
        answer: Update = self._actor.call("exchange", held, taught, drafter, idle_s)
        return answer

    def fetch(self, update: Update) -> Mapping[str, Tensor]:
        tensors: Mapping[str, Tensor] = ray.get(update.tensors[0], timeout=FETCH_TIMEOUT_S)
        return tensors

    def go_back(self, number: int) -> tuple[int | None, str]:
        """See SharedActor.call."""
        answer: tuple[int | None, str] = self._actor.call("go_back", number)
        return answer


class LearningMember(Member):
    def __init__(self, teacher: Teacher, loop: DraftLoop, strategy: DraftModelStrategy) -> None:
        super().__init__("trainer", self._once)
        self._teacher, self._loop, self._strategy = teacher, loop, strategy
        self._name = secrets.token_hex(8)
        self._held: tuple[str, int] | None = None
        """Trainer and number of the version that was dealt with last; None: none was."""

        self._drafting = 0
        """Number of the version that drafts."""

        self.changes = 0
        self.refused = 0
        """Versions that cannot be what a trainer made."""

        self.figures: dict[str, Any] = {}

    def _once(self) -> bool:
        update = self._teacher.exchange(self._held, self._loop.taught(), self._name, self._loop.idle_s())
        self.figures = update.figures
        if update.tensors:
            tensors = self._teacher.fetch(update)
            # A trainer never gives these out. What did is not to be believed in anything else either.
            if not tensors or not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
                self.refused += 1
                logger.error("version %s is refused: it holds numbers that are not finite", update.version)
            else:
                self._loop.change(partial(self._strategy.change_weights, tensors))
                self.changes += 1
                self._drafting = update.version[1]
                logger.info("drafting with version %d of trainer %s", update.version[1], update.version[0])
        self._held = update.version
        return False

    def go_back(self, number: int) -> tuple[int | None, str]:
        """For all drafters of the trainer's, this one too, with the next exchange. See Teacher."""
        return self._teacher.go_back(number)

    def status(self) -> dict[str, Any]:
        """In plain values."""
        return {
            "version": self._drafting,
            "changes": self.changes,
            "refused": self.refused,
            "failures": self.failures,
            "dropped_texts": self._loop.dropped_lessons,
            "trainer": self.figures,
        }
