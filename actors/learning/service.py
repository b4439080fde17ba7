"""Runs the trainer as a Ray actor, which takes training samples from drafters and publishes versions.

It works at the lowest priority, on cores or a GPU of its own. Losing it costs what it learned since the last version on
disk, and nothing else.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from outrider.actors.learning.draft_models import load, local_copy, tensors_of
from outrider.actors.learning.learner import Learner
from outrider.actors.learning.texts import Text, general_texts
from outrider.actors.learning.versions import Version, VersionStore, sampled_digest
from outrider.actors.observability.logs import configure as configure_logging
from outrider.cluster.config import LearningConfig
from outrider.cluster.placement import bind_to

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

_PAUSE_S = 0.5
_IDLE_LIFE_S = 1800.0
"""A trainer that was not called for so long ends itself: its application is gone. What was learned may be in memory
alone, and a sole drafter that comes back may have had to wait for a node."""


@dataclass(frozen=True)
class Report:
    """Describes a drafter to the trainer. A version is named by learner and number."""

    drafter: str  # the same after a restart
    held: tuple[str, int] | None = None  # the version that it has dealt with last; None: it drafts as it was loaded
    refused: tuple[str, int] | None = None  # the last version that it could not load


@dataclass
class Update:
    """The trainer answers a drafter with this. version: that is to serve. base: sampled_digest of the checkpoint that
    it was learned from. tensors: a reference to them, in a list lest Ray fetch it, where the drafter holds another
    version."""

    version: tuple[str, int]
    base: str
    figures: dict[str, Any]
    tensors: list[Any] = field(default_factory=list)


class VersionServer:
    """Answers drafters. A version that a drafter could not load is not given to it again, after a restart neither."""

    def __init__(self, learner: Learner, base: str, put: Callable[[dict[str, Tensor]], Any]) -> None:
        """base, put: the digest and a reference to tensors, as Update has them."""
        self._learner, self._base, self._put = learner, base, put
        self._last: tuple[Version, Any] | None = None
        self._refused: dict[str, tuple[str, int]] = {}

    def exchange(self, report: Report, texts: list[Text], **figures: Any) -> Update:
        """figures: figures to add to the learner's."""
        self._learner.add(texts)
        if report.refused is not None:
            self._refused[report.drafter] = report.refused
        serving = self._learner.serving
        version = (self._learner.id, serving.number)
        update = Update(version, self._base, {**self._learner.figures(), **figures})
        has_it = report.held == version or (report.held is None and serving.number == 0)
        if not has_it and self._refused.get(report.drafter) != version:
            if self._last is None or self._last[0] is not serving:
                self._last = serving, self._put(dict(serving.tensors))
            update.tensors = [self._last[1]]
        return update


class DrafterTrainer:
    """Trains one draft model for all its drafters. Construction loads the model."""

    def __init__(self, model: str, revision: str | None, settings: LearningConfig) -> None:
        configure_logging()
        os.nice(19)  # the lowest priority
        if settings.cores is not None:
            bind_to(settings.cores)
        import torch

        from outrider.actors.learning.train import fastest_dtype

        base = local_copy(model, revision)
        device = "cuda" if settings.num_gpus else "cpu"
        if not settings.num_gpus:
            torch.set_num_threads(len(settings.cores or [0]))
        drafter = load(base, torch.float32, device)
        general = general_texts(settings.general, int(drafter.get_output_embeddings().weight.shape[0]))
        kept = next(tensor.dtype for name, tensor in tensors_of(base) if name.startswith("model.layers."))
        dtype = fastest_dtype(device)
        self._learner = Learner(drafter, settings, dtype=dtype, kept_dtype=kept, general=general)
        self._store: VersionStore | None = None
        if settings.directory is not None:
            self._store = VersionStore(Path(settings.directory).expanduser(), base)
            if (found := self._store.latest(set(self._learner.serving.tensors))) is not None:
                self._learner.resume(*found)
        self._saved = self._learner.serving
        self._store_failures = 0
        self._versions = VersionServer(self._learner, sampled_digest(base), ray.put)
        self._asked_at = time.monotonic()
        threading.Thread(target=self._train, name="training", daemon=True).start()
        threading.Thread(target=self._end_when_idle, name="idle", daemon=True).start()

    async def exchange(self, report: Report, texts: list[Text]) -> Update:
        """Calls VersionServer.exchange."""
        self._asked_at = time.monotonic()
        return self._versions.exchange(report, texts, store_failures=self._store_failures)

    async def go_back(self, number: int) -> tuple[int | None, str]:
        """Calls Learner.go_back, and returns the new number, or None and why not. A restart does not undo it."""
        self._asked_at = time.monotonic()
        try:
            serving = self._learner.go_back(number)
        except ValueError as error:
            return None, str(error)
        self._on_disk(lambda store: store.remove_after(number))
        return serving, ""

    def _end_when_idle(self) -> None:
        while time.monotonic() - self._asked_at < _IDLE_LIFE_S:
            time.sleep(_IDLE_LIFE_S / 4)
        os._exit(0)

    def _train(self) -> None:
        while True:
            try:
                worked = self._learner.work()
            except BaseException:
                # What is in memory may be anything now. Drafters keep what they have until another trainer is there.
                logger.exception("training failed; this trainer ends and will be made anew")
                os._exit(1)
            if (serving := self._learner.serving) is not self._saved:
                self._saved = serving
                self._on_disk(partial(VersionStore.save, number=serving.number, tensors=serving.tensors))
            if not worked:
                time.sleep(_PAUSE_S)

    def _on_disk(self, action: Callable[[VersionStore], object]) -> None:
        """Counts what fails and never raises: learning goes on in memory, whatever the disk does."""
        if self._store is None:
            return
        try:
            action(self._store)
        except Exception as error:  # noqa: BLE001 - the disk's errors, and safetensors'
            self._store_failures += 1
            logger.error("drafter.learn.directory: %s", error)
