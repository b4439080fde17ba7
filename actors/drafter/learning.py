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
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import ray

from outrider.actors.drafter.draft_model import DraftModelProposer
from outrider.actors.drafter.hang_watch import STEP, SWAP
from outrider.actors.drafter.loop import DraftLoop
from outrider.actors.drafter.shared_actor import Member, SharedActor, get_or_create
from outrider.actors.learning.draft_models import local_copy, tensors_of
from outrider.actors.learning.service import DrafterTrainer, Report, Update
from outrider.actors.learning.texts import Text
from outrider.actors.learning.versions import sampled_digest
from outrider.cluster.config import DraftModelConfig, LearningConfig
from outrider.cluster.placement import OWN_GPUS

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 600.0
"""A trainer loads the draft model before it answers."""

FETCH_TIMEOUT_S = 120.0
"""For the tensors of a version, which may lie on another node."""


class TrainerClient(Protocol):
    """The trainer as a drafter sees it; may raise whatever a call to another process raises."""

    def exchange(self, report: Report, taught: list[Text]) -> Update:
        """See DrafterTrainer.exchange."""

    def fetch(self, update: Update) -> Mapping[str, Tensor]:
        """The version's tensors, by the checkpoint's names."""

    def base(self) -> str:
        """sampled_digest of the drafter's own checkpoint."""

    def as_loaded(self, names: Collection[str]) -> Mapping[str, Tensor]:
        """These tensors of the drafter as it was loaded."""

    def go_back(self, number: int) -> tuple[int | None, str]:
        """See DrafterTrainer.go_back."""


def trainer_options(learn: LearningConfig) -> dict[str, Any]:
    """Returns Ray's options for the trainer's actor. It reserves no CPU: at the lowest priority it costs a drafter on
    the same core 3 to 6% of its rounds, and none on a core of its own (docs/learning.md)."""
    return {"num_gpus": learn.num_gpus, "max_concurrency": 8, "runtime_env": {"env_vars": OWN_GPUS}}


class RayTrainerClient:
    def __init__(self, app_name: str, config: DraftModelConfig) -> None:
        learn = config.learn
        assert learn is not None
        self._model, self._revision = config.model, config.revision
        # Another model, or other settings, are another trainer's: one of an application before this may still be there.
        local = Path(config.model).expanduser()
        self._base = sampled_digest(local) if local.is_dir() else None
        told = json.dumps([config.model, self._base or config.revision, learn.model_dump()], sort_keys=True)
        name = f"Trainer:{app_name}:{hashlib.sha256(told.encode()).hexdigest()[:8]}"
        options = trainer_options(learn)
        self._actor = SharedActor(
            lambda: get_or_create(DrafterTrainer, name, config.model, config.revision, learn, **options),
            start_timeout_s=START_TIMEOUT_S,
        )

    def exchange(self, report: Report, taught: list[Text]) -> Update:
        """See SharedActor.call."""
        answer: Update = self._actor.call("exchange", report, taught)
        return answer

    def fetch(self, update: Update) -> Mapping[str, Tensor]:
        tensors: Mapping[str, Tensor] = ray.get(update.tensors[0], timeout=FETCH_TIMEOUT_S)
        return tensors

    def base(self) -> str:
        if self._base is None:
            self._base = sampled_digest(local_copy(self._model, self._revision))
        return self._base

    def as_loaded(self, names: Collection[str]) -> Mapping[str, Tensor]:
        checkpoint = local_copy(self._model, self._revision)
        return {name: tensor for name, tensor in tensors_of(checkpoint) if name in names}

    def go_back(self, number: int) -> tuple[int | None, str]:
        """See SharedActor.call."""
        answer: tuple[int | None, str] = self._actor.call("go_back", number)
        return answer


class LearningMember(Member):
    def __init__(
        self, teacher: TrainerClient, loop: DraftLoop, proposer: DraftModelProposer, drafter: str | None = None
    ) -> None:
        """drafter: the same after a restart; None: there is none."""
        super().__init__("trainer", self._once)
        self._teacher, self._loop, self._proposer = teacher, loop, proposer
        self._name = drafter or secrets.token_hex(8)
        self._held: tuple[str, int] | None = None
        """Trainer and number of the version that was dealt with last; None: none was."""

        self._taking: tuple[str, int] | None = None
        """Likewise, of one that has been handed to the loop and is not loaded yet."""

        self._tensors: Mapping[str, Tensor] | None = None
        """What drafts; None: as it was loaded."""

        self._drafting = 0
        """Number of the version that drafts."""

        self._refused: tuple[str, int] | None = None
        """The last of those that `refused` counts."""

        self._is_swapping = False
        self.changes = 0
        self.refused = 0
        """Versions that cannot be what this drafter's trainer made, or could not be loaded."""

        self.figures: dict[str, Any] = {}

    def _once(self) -> bool:
        update = self._teacher.exchange(Report(self._name, self._held, self._refused), self._loop.taught())
        self.figures = update.figures
        if not update.tensors:
            self._held = update.version
        elif update.version not in (self._taking, self._held):
            self._offered(update)
        return False

    def _offered(self, update: Update) -> None:
        """A version that is new here: what a trainer of this very checkpoint cannot have made is refused."""
        if update.base != self._teacher.base():
            self._refuse(update.version)
            logger.error(
                "drafter.model: version %s is refused: it was learned from another checkpoint (%.12s…, not %.12s…); "
                "put the same one on every node where the trainer may run",
                update.version, update.base, self._teacher.base(),
            )  # fmt: skip
            return
        tensors = self._teacher.fetch(update)
        # A trainer never gives these out. What did is not to be believed in anything else either.
        if not tensors or not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
            self._refuse(update.version)
            logger.error("version %s is refused: it holds numbers that are not finite", update.version)
            return
        self._taking = update.version
        self._loop.change(partial(self._proposer.change_weights, partial(self._swap, update.version, tensors)))

    def _swap(
        self,
        version: tuple[str, int],
        tensors: Mapping[str, Tensor],
        load: Callable[[Mapping[str, Any]], None],
    ) -> None:
        """On the loop's thread: what cannot be loaded leaves what was there before. Raises where that cannot be loaded
        again either: nobody knows then what drafts, and the next life is not given the version a third time."""
        self._is_swapping = True
        try:
            try:
                load(tensors)
            except Exception:
                logger.exception("version %s cannot be loaded: what was there before is loaded again", version)
                load(self._teacher.as_loaded(tensors.keys()) if self._tensors is None else self._tensors)
                self._refuse(version)
                return
            self._tensors, self._drafting, self._held = tensors, version[1], version
            self.changes += 1
            logger.info("drafting with version %d of trainer %s", version[1], version[0])
        finally:
            self._is_swapping = False

    def _refuse(self, version: tuple[str, int]) -> None:
        self.refused += 1
        self._refused = self._held = version

    def at_work(self) -> dict[int | str, int]:
        """See DraftLoop.at_work; a swap is told apart from a step. Takes no lock."""
        at_work = self._loop.at_work()
        if self._is_swapping and STEP in at_work:
            at_work[SWAP] = at_work.pop(STEP)
        return at_work

    def go_back(self, number: int) -> tuple[int | None, str]:
        """For all drafters of the trainer's, this one too, with the next exchange. See TrainerClient."""
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
