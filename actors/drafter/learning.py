"""Sends a drafter's training samples to the trainer, and loads the versions that the trainer publishes.

The trainer is an actor that all drafters of an application with the same model share (actors/learning/service.py). A
drafter follows the trainer whatever it has loaded itself: a trainer that was restarted publishes the original weights
until it has a better version, so every version that drafts has passed the present trainer's gate.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import ray

from outrider.actors.drafter.draft_model import DraftModelProposer
from outrider.actors.drafter.loop import DraftLoop
from outrider.actors.learning.draft_models import local_copy, tensors_of
from outrider.actors.learning.service import DrafterTrainer, Report, Update
from outrider.actors.learning.texts import Text
from outrider.actors.learning.versions import sampled_digest
from outrider.cluster.config import DraftModelConfig, LearningConfig
from outrider.cluster.head import anywhere
from outrider.cluster.placement import NAMESPACE, OWN_GPUS

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

_EXCHANGE_EVERY_S = 1.0
CALL_TIMEOUT_S = 5.0
START_TIMEOUT_S = 600.0
"""The time for the trainer's first answer, before which it loads the draft model."""

FETCH_TIMEOUT_S = 120.0
"""The time to fetch a version's tensors, which may be on another node."""


class TrainerClient(Protocol):
    """Calls the trainer. Its methods may raise any error of a call to another process."""

    def exchange(self, report: Report, texts: list[Text]) -> Update:
        """Calls DrafterTrainer.exchange."""

    def fetch(self, update: Update) -> Mapping[str, Tensor]:
        """Returns a version's tensors, by the checkpoint's names."""

    def base(self) -> str:
        """Returns the sampled_digest of the drafter's own checkpoint."""

    def as_loaded(self, names: Collection[str]) -> Mapping[str, Tensor]:
        """Returns some tensors of the drafter's original weights."""

    def go_back(self, number: int) -> tuple[int | None, str]:
        """Calls DrafterTrainer.go_back."""


def trainer_options(learn: LearningConfig) -> dict[str, Any]:
    """Returns Ray's options for the trainer's actor.

    It reserves no CPU: at the lowest priority it costs a drafter on the same core 3 to 6% of its rounds, and none on a
    core of its own (docs/learning.md).
    """
    return {
        **anywhere(),
        "num_cpus": 0,
        "num_gpus": learn.num_gpus,
        "max_concurrency": 8,
        "runtime_env": {"env_vars": OWN_GPUS},
    }


class RayTrainerClient:
    """Implements TrainerClient on the trainer's Ray actor, which the first call of any drafter starts."""

    def __init__(self, app_name: str, config: DraftModelConfig) -> None:
        learn = config.learn
        assert learn is not None
        self._model, self._revision, self._learn = config.model, config.revision, learn
        # The name depends on model and settings, since the trainer of an earlier application may still run.
        local = Path(config.model).expanduser()
        self._base = sampled_digest(local) if local.is_dir() else None
        told = json.dumps([config.model, self._base or config.revision, learn.model_dump()], sort_keys=True)
        self._actor_name = f"Trainer:{app_name}:{hashlib.sha256(told.encode()).hexdigest()[:8]}"
        self._actor: Any = None

    def exchange(self, report: Report, texts: list[Text]) -> Update:
        """See `_call`."""
        answer: Update = self._call("exchange", report, texts)
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
        """See `_call`."""
        answer: tuple[int | None, str] = self._call("go_back", number)
        return answer

    def _call(self, method: str, *args: Any) -> Any:
        """Calls a method. Raises RayError or GetTimeoutError; then the next call looks the actor up again."""
        actor, self._actor = self._actor, None
        timeout_s = CALL_TIMEOUT_S
        if actor is None:
            actor, timeout_s = self._start(), START_TIMEOUT_S
        answer = ray.get(getattr(actor, method).remote(*args), timeout=timeout_s)
        self._actor = actor
        return answer

    def _start(self) -> Any:
        """Returns the actor's handle. It may still start."""
        shared = {"name": self._actor_name, "namespace": NAMESPACE, "get_if_exists": True, "lifetime": "detached"}
        trainer = ray.remote(DrafterTrainer).options(**shared, **trainer_options(self._learn))
        return trainer.remote(self._model, self._revision, self._learn)


class LearningMember:
    """Exchanges samples and versions with the trainer at intervals, beside a drafter's loop."""

    def __init__(
        self, trainer: TrainerClient, loop: DraftLoop, proposer: DraftModelProposer, drafter: str | None = None
    ) -> None:
        """drafter: a name that stays the same after a restart; None: a random one."""
        self._trainer, self._loop, self._proposer = trainer, loop, proposer
        self._name = drafter or secrets.token_hex(8)
        self._held: tuple[str, int] | None = None
        """Trainer and number of the version that was loaded or refused last, if any."""

        self._taking: tuple[str, int] | None = None
        """Trainer and number of a version that the loop has not loaded yet."""

        self._tensors: Mapping[str, Tensor] | None = None
        """The weights in use; None for the original ones."""

        self._drafting = 0
        """Number of the version in use."""

        self._refused: tuple[str, int] | None = None
        """The last version that was refused."""

        self.changes = 0
        self._is_failing = False
        self.failures = 0
        """Exchanges that failed. What they carried is lost."""

        self.refused = 0
        """Versions that are not of this drafter's trainer, or could not be loaded."""

        self.figures: dict[str, Any] = {}

    def start(self) -> None:
        """Exchanges for ever, on a thread of its own."""

        def run() -> None:
            while True:
                self.exchange()
                time.sleep(_EXCHANGE_EVERY_S)

        threading.Thread(target=run, name="trainer", daemon=True).start()

    def exchange(self) -> None:
        """Exchanges once. It counts failures and never raises."""
        try:
            report = Report(self._name, self._held, self._refused)
            update = self._trainer.exchange(report, self._loop.take_training_texts())
            self.figures = update.figures
            if not update.tensors:
                self._held = update.version
            elif update.version not in (self._taking, self._held):
                self._offered(update)
            self._is_failing = False
        except Exception as error:  # noqa: BLE001 - of another process; drafting goes on with what is loaded
            self.failures += 1
            if not self._is_failing:
                logger.warning("the trainer is not reachable, drafting goes on with the present weights: %s", error)
            self._is_failing = True

    def _offered(self, update: Update) -> None:
        """Hands a new version to the loop, and refuses one that was trained from another checkpoint."""
        if update.base != self._trainer.base():
            self._refuse(update.version)
            logger.error(
                "drafter.model: version %s is refused: it was learned from another checkpoint (%.12s…, not %.12s…); "
                "put the same one on every node where the trainer may run",
                update.version, update.base, self._trainer.base(),
            )  # fmt: skip
            return
        tensors = self._trainer.fetch(update)
        # A trainer never publishes these, so nothing else of this version can be trusted either.
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
        """Loads a version on the loop's thread, or loads the previous weights again if that fails.

        Raises where these cannot be loaded either, since the weights are then undefined. The trainer does not offer the
        version a third time after the restart.
        """
        try:
            load(tensors)
        except Exception:
            logger.exception("version %s cannot be loaded: the previous weights are loaded again", version)
            load(self._trainer.as_loaded(tensors.keys()) if self._tensors is None else self._tensors)
            self._refuse(version)
            return
        self._tensors, self._drafting, self._held = tensors, version[1], version
        self.changes += 1
        logger.info("drafting with version %d of trainer %s", version[1], version[0])

    def _refuse(self, version: tuple[str, int]) -> None:
        self.refused += 1
        self._refused = self._held = version

    def go_back(self, number: int) -> tuple[int | None, str]:
        """Returns all drafters of the trainer to an earlier version, with their next exchange. See TrainerClient."""
        return self._trainer.go_back(number)

    def status(self) -> dict[str, Any]:
        """Returns the state in plain values."""
        return {
            "version": self._drafting,
            "changes": self.changes,
            "refused": self.refused,
            "failures": self.failures,
            "dropped_texts": self._loop.dropped_texts,
            "trainer": self.figures,
        }
