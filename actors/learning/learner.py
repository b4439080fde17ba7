"""Trains a draft model on what it drafted for, and decides which version of it serves.

One model in memory is trained all the time. Every so many steps a copy of it is compared with the version that serves,
on texts that neither was trained on, and takes its place only if it is better with confidence (gate.py). The version
before is kept: if texts that came since say with confidence that it was better, it serves again. This is online
speculative decoding (Liu et al., 2310.07177), with a replay and a gate, since plain online training is worse than
offline training by a tenth to a quarter.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from outrider.actors.learning.gate import LEAST_TEXTS, Difference, Verdict, judge
from outrider.actors.learning.replay import HELD_TEXTS, Replay
from outrider.actors.learning.texts import Text
from outrider.actors.learning.train import Trainer
from outrider.actors.learning.versions import KEPT_VERSIONS, MOST_SHOWN, REPLACED, REVERTED, WITHDRAWN, Version
from outrider.cluster.config import LearningConfig

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

BATCH_SIZE = 8
"""Texts a training step: 0.46 s of a core (SmolLM2-135M, two layers)."""

STEPS_PER_VERSION = 25
"""Training steps between two comparisons. With these and PASSES acceptance rose from 0.024 to 0.186 of the drafts
within 13 minutes of a shift (docs/learning.md)."""

PASSES = 16
"""How often a text is trained on, on average, before the trainer waits for new ones."""

_RISE_STEPS = 20  # over which the learning rate rises, at the beginning and whenever training goes back


class Learner:
    """Trains a drafter and decides which version serves.

    `work` and `compare` belong to one thread; the other methods may be called from any, `resume` before all others.
    """

    def __init__(
        self,
        drafter: PreTrainedModel,
        settings: LearningConfig,
        *,
        dtype: torch.dtype,
        kept_dtype: torch.dtype,
        general: Sequence[Text] = (),
    ) -> None:
        """drafter: float32, on its device. dtype: of its forward pass in training. kept_dtype: of the checkpoint.
        general: texts that it must not get worse on; half of them are only ever compared on."""
        self.id = secrets.token_hex(4)  # tells its versions from another learner's
        self._kept_dtype = kept_dtype
        self._trainer = Trainer(drafter, settings.learning_rate, dtype)
        # What the drafter was made from it knows by heart, and loses whatever it learns: the others tell more.
        kept_out = [text for text in general if text.held_out]
        if len({text.prompt for text in kept_out}) < LEAST_TEXTS:
            kept_out = [text for text in general if text.prompt % 2]
        self._held_general = kept_out[:HELD_TEXTS]
        prompts = {text.prompt for text in kept_out}
        self._replay = Replay(settings.held_out, [text for text in general if text.prompt not in prompts])
        self._lock = threading.Lock()
        self._serving = self._loaded = Version(0, self._rounded())
        self._previous: Version | None = None
        self._follows = self._serving  # the version that training goes on from
        self._versions = deque([self._serving], maxlen=MOST_SHOWN)
        self._to_train_on = 0  # texts, each as often as it is still to be trained on
        self._since_reset = 0
        self._last_verdict: Verdict | None = None
        self._counts = dict.fromkeys(("steps", "texts", "tokens", "adopted", "withdrawn", "reverted"), 0)
        self._refused: Counter[str] = Counter()
        self._loss = 0.0

    @property
    def serving(self) -> Version:
        with self._lock:
            return self._serving

    def figures(self) -> dict[str, Any]:
        """Returns plain values for status and metrics."""
        with self._lock:
            return {
                **self._counts,
                "refused": dict(self._refused),
                "version": self._serving.number,
                "learner": self.id,
                "held_out": self._replay.num_held_out,
                "loss": self._loss,
                "last_verdict": self._last_verdict and self._last_verdict.row(),
                "versions": [version.row() for version in self._versions],
            }

    def add(self, texts: Sequence[Text]) -> None:
        """Takes texts to learn from, or to compare versions on. Those with tokens that the drafter does not have are
        passed over."""
        known = [text for text in texts if int(text.ids.max()) < self._trainer.vocab_size]
        with self._lock:
            self._to_train_on += PASSES * sum([self._replay.add(text) for text in known])
            # What is not kept any more cannot be trained on.
            self._to_train_on = min(self._to_train_on, PASSES * self._replay.num_kept)
            self._counts["texts"] += len(known)
            self._counts["tokens"] += sum(len(text.top_ids) for text in known)

    def resume(self, number: int, tensors: Mapping[str, Tensor]) -> None:
        """Serves a version of an earlier life. The drafter as it was loaded counts as the one before it, and serves
        again if it is better on later texts. Raises KeyError and RuntimeError for tensors that are not this drafter's.
        """
        self._train_from(Version(number, tensors))
        self._publish(Version(number, self._rounded()), REPLACED, previous=self._serving)

    def go_back(self, number: int) -> int:
        """Serves a former version, at once. What was learned since is forgotten, and so are all texts, those that
        versions are compared on too: else the same would be learned and let in again. Returns the number under which it
        serves. Raises ValueError for one that serves, or is not kept."""
        with self._lock:
            kept = {each.number: each for each in (self._loaded, *self._versions) if each.tensors}
            if number not in kept:
                raise ValueError(f"{number} is not kept; send one of {', '.join(map(str, sorted(kept)))}")
            if kept[number].tensors is self._serving.tensors:
                raise ValueError(f"{number} serves; send one that does not")
            logger.warning("version %d is left for %d by hand", self._serving.number, number)
            self._counts["reverted"] += 1
            self._publish(self._next(kept[number].tensors, again=number), REVERTED)
            self._replay.forget()
            self._to_train_on = 0
            return self._serving.number

    def work(self) -> bool:
        """Makes one step of training, and the comparison that is due after it. False: nothing is to be learned now."""
        self._follow()
        with self._lock:
            batch = self._replay.batch(BATCH_SIZE) if self._to_train_on > 0 else []
            self._to_train_on -= len(batch)
        if not batch:
            return False
        self._since_reset += 1
        rate = min(1.0, self._since_reset / _RISE_STEPS)
        self._loss, _ = self._trainer.step(self._counts["steps"], rate, batch)
        self._counts["steps"] += 1
        if self._counts["steps"] % STEPS_PER_VERSION == 0:
            self.compare()
        return True

    def compare(self) -> None:
        """Compares the version that serves with the one before it, and what was learned with what serves then."""
        self._roll_back()
        serving = self._follow()
        with self._lock:
            recent, past = self._replay.held_recent(), self._replay.held_past()
            candidate = self._next(self._rounded())
        if all(bool(tensor.isfinite().all()) for tensor in candidate.tensors.values()):
            general = self._difference(candidate, self._loaded, self._held_general) if self._held_general else None
            on_recent, on_past = (self._difference(candidate, serving, texts) for texts in (recent, past))
            verdict = judge(on_recent, on_past, general)
        else:
            verdict = Verdict("not_finite")
        with self._lock:
            if self._serving is not serving:
                return  # an operator went back meanwhile, and this was learned before
            self._last_verdict = candidate.verdict = verdict
            if verdict.adopted:
                self._counts["adopted"] += 1
                self._publish(candidate, REPLACED, previous=serving)
                self._follows = candidate
            else:
                self._refused[verdict.reason] += 1
        logger.info("version %d, after %d steps: %s", candidate.number, candidate.step, verdict)
        if verdict.is_bad:
            self._train_from(serving)

    def _roll_back(self) -> None:
        """Serves the version before again if it was better on texts that came since.

        In each comparison an equally good version is withdrawn with a chance of one in twenty: no acceptance is lost.
        """
        with self._lock:
            serving, previous = self._serving, self._previous
            since = self._replay.held_recent(serving.held_out)
        if previous is None:
            return
        difference = self._difference(serving, previous, since)
        with self._lock:
            if difference.is_loss and self._serving is serving:
                logger.warning("version %d is withdrawn: acceptance %+.4f", serving.number, difference.mean)
                self._counts["withdrawn"] += 1
                serving.since = difference
                self._publish(self._next(previous.tensors, again=previous.number), WITHDRAWN)

    def _follow(self) -> Version:
        """Returns what serves. Where a former version came back, training goes on from there."""
        with self._lock:
            serving = self._serving
            for old in list(self._versions)[:-KEPT_VERSIONS]:
                if old is not self._loaded:
                    old.tensors = {}
        if self._follows is not serving:
            self._train_from(serving)
        return serving

    def _next(self, tensors: Mapping[str, Tensor], again: int | None = None) -> Version:
        """Numbers a version."""
        steps, held_out = self._counts["steps"], self._replay.num_held_out
        return Version(self._serving.number + 1, tensors, steps, held_out, again=again)

    def _publish(self, version: Version, why: str, previous: Version | None = None) -> None:
        """Makes a version serve. why: the state of the one that served until now. previous: may serve again."""
        self._serving.state = why
        self._serving, self._previous = version, previous
        self._versions.append(version)

    def _difference(self, new: Version, old: Version, texts: Sequence[Text]) -> Difference:
        """Compares two versions. A prompt counts once, however many parts of its answers there are: these have much in
        common."""
        return Difference.of(*(self._scores(version, texts) for version in (new, old)))

    def _scores(self, version: Version, texts: Sequence[Text]) -> list[float]:
        """Returns the acceptance of each prompt's texts, in the order in which the prompts first come. A text is
        measured once, as long as it and the version are there."""
        if missing := [text for text in texts if text not in version.scores]:
            with self.holding(version.tensors) as trainer:
                version.scores.update(zip(missing, trainer.acceptance(missing), strict=True))
        of_prompt: dict[int, list[float]] = {}
        for text in texts:
            of_prompt.setdefault(text.prompt, []).append(version.scores[text])
        return [sum(each) / len(each) for each in of_prompt.values()]

    @contextmanager
    def holding(self, tensors: Mapping[str, Tensor]) -> Iterator[Trainer]:
        """Gives the trainer's model these tensors instead of those in training."""
        kept = {name: parameter.detach().clone() for name, parameter in self._trainer.trained.items()}
        try:
            self._trainer.load(tensors)
            yield self._trainer
        finally:
            self._trainer.load(kept)

    def _train_from(self, version: Version) -> None:
        """Trains on from a version; what the optimizer remembers led elsewhere."""
        self._trainer.load(version.tensors)
        self._trainer.optimizer.state.clear()
        self._follows, self._since_reset = version, 0

    def _rounded(self) -> dict[str, Tensor]:
        """Copies what is in training to the CPU, as the drafter holds it."""
        trained = self._trainer.trained.items()
        return {name: tensor.detach().to("cpu", self._kept_dtype, copy=True) for name, tensor in trained}
