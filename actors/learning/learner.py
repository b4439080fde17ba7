"""Training a draft model on what it drafted for, and the versions that come of it.

One model in memory is trained all the time; a version is a copy of its tensors at one moment, rounded as the drafter
holds them. Every so many steps the latest is compared with the one that serves, on texts that neither was trained on,
and takes its place only if it is better for certain (gate.py). The one before is kept: if texts that came since say
for certain that it was better, it comes back; so does a former one that somebody asks for. The approach of online
speculative decoding (Liu et al., 2310.07177), with a replay and gates, since plain online training is worse than
offline training by a tenth to a quarter.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from outrider.actors.learning.draft_models import freeze
from outrider.actors.learning.gate import LEAST_TEXTS, Difference, Verdict, judge
from outrider.actors.learning.history import REPLACED, REVERTED, WITHDRAWN, History, verdict_row
from outrider.actors.learning.lessons import Taught
from outrider.actors.learning.replay import HELD_TEXTS, Replay
from outrider.actors.learning.text import Text
from outrider.actors.learning.train import Recipe, Trainer
from outrider.cluster.learning_config import LearningConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

Tensors = Mapping[str, Tensor]

_RISE_STEPS = 20
"""Of the learning rate, at the beginning and after a way back."""

PARTS = (0.6, 0.35, 0.2, 0.1)
"""Of the way from the version that serves to what was learned: candidates, where the whole gains and forgets."""


@dataclass(frozen=True)
class Version:
    """learner: which one made it; another one's mean nothing to it. number: 0 is the drafter as it was loaded."""

    learner: str
    number: int


@dataclass
class Learnt:
    """A version's tensors, and what was found when it was adopted. held_out: texts that were there by then."""

    version: Version
    tensors: Tensors
    verdict: Verdict | None = None
    held_out: int = 0
    step: int = 0


@dataclass
class Counts:
    steps: int = 0
    texts: int = 0
    tokens: int = 0
    """Taught, held-out ones too."""

    adopted: int = 0
    withdrawn: int = 0
    reverted: int = 0
    """Versions that somebody went back from."""

    refused: dict[str, int] = field(default_factory=dict)
    """Versions that the gate kept out, by reason."""


class Scores:
    """Acceptance by version and text. Each is measured once, as long as both are there."""

    def __init__(self, measure: Callable[[Tensors, Sequence[Text]], list[float]]) -> None:
        self._measure = measure
        self._known: list[tuple[Tensors, dict[int, tuple[Text, float]]]] = []
        """By identity, of texts and tensors that are held here so that no other gets their ids."""

    def of(self, version: Tensors, texts: Sequence[Text]) -> list[float]:
        known = next((scores for tensors, scores in self._known if tensors is version), None)
        if known is None:
            known = {}
            self._known.append((version, known))
        missing = {id(text): text for text in texts if id(text) not in known}
        if missing:
            measured = self._measure(version, list(missing.values()))
            known.update({key: (missing[key], score) for key, score in zip(missing, measured, strict=True)})
        return [known[id(text)][1] for text in texts]

    def keep(self, versions: Sequence[Tensors], texts: Sequence[Text]) -> None:
        """What is not of these is forgotten."""
        held = set(map(id, texts))
        self._known = [
            (tensors, {key: score for key, score in scores.items() if key in held})
            for tensors, scores in self._known
            if any(tensors is version for version in versions)
        ]


class Learner:
    """add and read from any thread; work belongs to one."""

    def __init__(
        self,
        drafter: PreTrainedModel,
        settings: LearningConfig,
        *,
        dtype: torch.dtype,
        kept_dtype: torch.dtype,
        general: Sequence[Text] = (),
        seed: int = 0,
    ) -> None:
        """drafter: float32, on its device. dtype: of its forward pass in training. kept_dtype: of the checkpoint.
        general: texts to keep to, see LearningConfig."""
        self._settings, self._kept_dtype = settings, kept_dtype
        # Contexts of its own tokens come with the text: accepted drafts are in it as often as a round gets past them.
        recipe = Recipe(seed, settings.learning_rate, settings.batch_size, own_share=0.0)
        self._trainer = Trainer(drafter, None, freeze(drafter, dtype), recipe, dtype, None)
        self._scores = Scores(self._acceptance)
        self._vocab_size = int(drafter.get_output_embeddings().weight.shape[0])
        # Never trained on, and where enough of them can be told, not when the drafter was made either: what it knows by
        # heart it loses, whatever it learns.
        kept_out = [text for text in general if text.held_out]
        if len(kept_out) < LEAST_TEXTS:
            kept_out = list(general)[:: max(min(round(1 / settings.held_out), len(general) // LEAST_TEXTS), 2)]
        self._held_general = kept_out[:HELD_TEXTS]
        held = set(map(id, self._held_general))
        self._replay: Replay[Text] = Replay(
            settings.recent_tokens,
            settings.past_tokens,
            settings.max_text_tokens,
            settings.held_out,
            seed,
            [text for text in general if id(text) not in held],
        )
        self._lock = threading.Lock()
        self._seen = Counts()
        self._serving = Learnt(Version(secrets.token_hex(4), 0), self._rounded())
        self._started_from = self._serving.tensors
        self._previous: Learnt | None = None
        self._kept: dict[int, Tensors] = {0: self._serving.tensors}
        """What can be gone back to, by number: the drafter as it was loaded, and the latest versions."""

        self._history = History()
        self._history.began(0, 0)
        self._went_back = False
        """Since the trainer's thread last looked."""

        self._looks = 0
        """At the version that serves and the one before it, see Difference.is_loss_in."""

        self._looked_at = 0
        """Held-out texts that had come by the last look."""

        self._last_number = 0
        self._last_verdict: Verdict | None = None
        self._since_reset = 0
        self._to_train_on = 0.0
        """Texts, each as often as it is still to be trained on."""

        self._loss = self._overlap = 0.0

    # From any thread.

    def add(self, taught: Sequence[Taught]) -> None:
        with self._lock:
            before = self._replay.num_added
            for part in taught:
                if int(part.ids.max()) >= self._vocab_size:
                    continue  # the drafter does not know such a token
                text = _text(part)
                self._replay.add(text, len(part.ids), part.prompt)
                self._seen.texts += 1
                self._seen.tokens += len(part.top_ids)
            if added := self._replay.num_added - before:
                # What is not kept any more cannot be trained on: where more comes than there is time for, what is kept
                # has its turns, and they end when nothing more comes.
                passes = self._settings.passes
                self._to_train_on = min(self._to_train_on + passes * added, passes * self._replay.num_kept)

    @property
    def serving(self) -> Learnt:
        with self._lock:
            return self._serving

    def figures(self) -> dict[str, Any]:
        """In plain values."""
        with self._lock:
            return {
                **asdict(self._seen),
                "version": self._serving.version.number,
                "learner": self._serving.version.learner,
                "held_out": self._replay.num_held_out,
                "loss": self._loss,
                "overlap": self._overlap,
                "last_verdict": verdict_row(self._last_verdict),
                "versions": self._history.rows(self._kept),
            }

    def count_from(self, number: int) -> None:
        """Before anything else: versions get higher numbers."""
        self._last_number = number

    def resume(self, number: int, tensors: Tensors) -> None:
        """Before anything else: a version that served in an earlier life. What was loaded counts as the one before it,
        and comes back if it is better on what is said now. Raises KeyError and RuntimeError for tensors that are not
        this drafter's."""
        self._go_back_to(tensors)
        self._previous = self._serving
        self._serving = Learnt(Version(self._serving.version.learner, number), self._rounded())
        self._last_number = max(self._last_number, number)
        self._kept[number] = self._serving.tensors
        self._history.ended(REPLACED)
        self._history.began(number, 0)

    def go_back(self, number: int) -> int:
        """From any thread: a former version serves again, at once. What was learned since is forgotten, and so are all
        texts, those that versions are compared on too: else the same would be learned and let in again. Returns the
        number under which it serves. Raises ValueError for one that serves, or is not kept."""
        with self._lock:
            tensors = self._kept.get(number)
            if tensors is None:
                raise ValueError(f"{number} is not kept; send one of {', '.join(map(str, sorted(self._kept)))}")
            if tensors is self._serving.tensors:
                raise ValueError(f"{number} serves; send one that does not")
            logger.warning("version %d is left for %d by hand", self._serving.version.number, number)
            self._seen.reverted += 1
            self._history.ended(REVERTED)
            self._publish(tensors, None, None, again=number)
            self._replay.forget()
            self._to_train_on = 0.0
            self._went_back = True
            return self._last_number

    # The trainer's thread.

    def turn(self, may_train: bool) -> bool:
        """See work; where it may not train it looks back only, whenever so many texts have come as can decide
        anything. What serves must not stay for want of time to make something better."""
        if may_train and self.work():
            return True
        with self._lock:
            due = self._replay.num_held_out - self._looked_at >= LEAST_TEXTS
        if due:
            self._look_back()
            self._keep_scores()
        return False

    def work(self) -> bool:
        """One step of training, and the comparison that is due after it. False: there is nothing to learn from now."""
        settings = self._settings
        self._follow()
        with self._lock:
            batch = self._replay.batch(settings.batch_size) if self._to_train_on > 0 else []
            self._to_train_on -= len(batch)
        if not batch:
            return False
        self._since_reset += 1
        rate = min(1.0, self._since_reset / _RISE_STEPS)
        self._loss, self._overlap = self._trainer.step(self._seen.steps, rate, batch)
        self._seen.steps += 1
        if self._seen.steps % settings.steps_per_version == 0:
            self.compare()
        return True

    def compare(self) -> None:
        """The version that serves with the one before it, and what was learned with what serves then."""
        self._look_back()
        serving = self._follow()
        with self._lock:
            recent, past = self._replay.held_recent(), self._replay.held_past()

        def verdict_on(candidate: Tensors) -> Verdict:
            return judge(
                self._difference(candidate, serving.tensors, recent),
                self._difference(candidate, serving.tensors, past),
                self._difference(candidate, self._started_from, self._held_general) if self._held_general else None,
                self._difference(candidate, self._started_from, past),
            )

        candidate = learned = self._rounded()
        if not all(bool(tensor.isfinite().all()) for tensor in learned.values()):
            first = verdict = Verdict(False, "not_finite")
        else:
            first = verdict = verdict_on(learned)
            # Part of the way often keeps most of a gain and loses next to nothing (Wortsman et al., 2109.01903).
            for share in PARTS if first.gains_and_forgets else ():
                candidate = _between(serving.tensors, learned, share)
                verdict = verdict_on(candidate)
                if not verdict.gains_and_forgets:
                    break
        with self._lock:
            if self._serving is not serving:
                return  # somebody went back meanwhile, and this was learned before
            self._last_verdict = verdict
            if verdict.adopted:
                self._seen.adopted += 1
                self._history.ended(REPLACED)
                self._publish(candidate, verdict, serving)
            else:
                self._seen.refused[verdict.reason] = self._seen.refused.get(verdict.reason, 0) + 1
        self._keep_scores()
        if verdict.adopted:
            logger.info("version %d serves: %s", self.serving.version.number, _said(verdict))
        elif first.is_bad:
            logger.warning("what was learned is not used, and forgotten: %s", _said(first))
            self._go_back_to(serving.tensors)

    def _look_back(self) -> None:
        """Whether texts that came since say that the version before the one that serves was better."""
        with self._lock:
            serving, previous = self._serving, self._previous
            since, num_held_out = self._replay.held_recent(serving.held_out), self._replay.num_held_out
            if previous is None or num_held_out == self._looked_at:
                return
            self._looked_at = num_held_out
        difference = self._difference(serving.tensors, previous.tensors, since)
        if difference.texts < LEAST_TEXTS:
            return
        self._looks += 1
        if not difference.is_loss_in(self._looks):
            return
        with self._lock:
            if self._serving is not serving:
                return
            self._seen.withdrawn += 1
            self._history.ended(WITHDRAWN, difference)
            self._publish(previous.tensors, previous.verdict, None, again=previous.version.number)
        logger.warning("version %d is withdrawn: acceptance %+.4f", serving.version.number, difference.mean)
        self._go_back_to(previous.tensors)

    def _keep_scores(self) -> None:
        """Of what may be compared again."""
        with self._lock:
            versions = [each.tensors for each in (self._serving, self._previous) if each is not None]
            texts = [*self._replay.held_recent(), *self._replay.held_past(), *self._held_general]
        self._scores.keep([*versions, self._started_from], texts)

    def _follow(self) -> Learnt:
        """What serves; where somebody went back to it, training goes on from there."""
        with self._lock:
            went_back, self._went_back, serving = self._went_back, False, self._serving
        if went_back:
            self._go_back_to(serving.tensors)
        return serving

    def _publish(
        self, tensors: Tensors, verdict: Verdict | None, previous: Learnt | None, again: int | None = None
    ) -> None:
        self._last_number += 1
        version = Version(self._serving.version.learner, self._last_number)
        self._serving = Learnt(version, tensors, verdict, self._replay.num_held_out, self._seen.steps)
        self._previous = previous
        self._looks, self._looked_at = 0, self._serving.held_out
        self._history.began(version.number, self._seen.steps, verdict, again)
        self._kept[version.number] = tensors
        for old in sorted(number for number in self._kept if number)[: -self._settings.kept_versions]:
            del self._kept[old]

    def _difference(self, new: Tensors, old: Tensors, texts: Sequence[Text]) -> Difference:
        """A prompt counts once, however many parts of its answers there are: these have much in common."""
        if not texts:
            return Difference.of((), ())
        return Difference.of(*(_by_prompt(self._scores.of(tensors, texts), texts) for tensors in (new, old)))

    def _acceptance(self, tensors: Tensors, texts: Sequence[Text]) -> list[float]:
        with self.holding(tensors) as trainer:
            return trainer.acceptance(texts)

    @contextmanager
    def holding(self, tensors: Tensors) -> Iterator[Trainer]:
        """The trainer's model with these tensors instead of those in training."""
        kept = {name: parameter.detach().clone() for name, parameter in self._trainer.trained.items()}
        try:
            self._set(tensors)
            yield self._trainer
        finally:
            self._set(kept)

    def _set(self, tensors: Tensors) -> None:
        with torch.no_grad():
            for name, parameter in self._trainer.trained.items():
                parameter.copy_(tensors[name])

    def _go_back_to(self, tensors: Tensors) -> None:
        """Train on from there; what the optimizer remembers led elsewhere."""
        self._set(tensors)
        self._trainer.optimizer.state.clear()
        self._since_reset = 0

    def _rounded(self) -> dict[str, Tensor]:
        """Copies on the CPU, as the drafter holds them."""
        state, _ = self._trainer.state()
        return {name: tensor.to("cpu", self._kept_dtype, copy=True) for name, tensor in state.items()}


def _between(start: Tensors, end: Tensors, share: float) -> dict[str, Tensor]:
    """share: of the way from start to end."""
    return {
        name: torch.lerp(tensor.float(), end[name].float(), share).to(tensor.dtype) for name, tensor in start.items()
    }


def _by_prompt(values: Sequence[float], texts: Sequence[Text]) -> list[float]:
    """Means, in the order in which the prompts first come."""
    of_prompt: dict[int, list[float]] = {}
    for value, text in zip(values, texts, strict=True):
        of_prompt.setdefault(text.prompt, []).append(value)
    return [sum(each) / len(each) for each in of_prompt.values()]


def _text(part: Taught) -> Text:
    return Text(
        prompt=part.prompt,
        sample=0 if part.greedy else 1,
        ids=torch.from_numpy(part.ids).long(),
        start=part.start,
        top_ids=torch.from_numpy(part.top_ids).long(),
        top_log_p=torch.from_numpy(part.top_log_p).float(),
    )


def _said(verdict: Verdict) -> str:
    parts = [
        f"{what} {difference.mean:+.4f} ± {difference.margin:.4f} on {difference.texts} texts"
        for what, difference in (
            ("recent", verdict.recent),
            ("past", verdict.past),
            ("past, since learning began,", verdict.past_begun),
            ("general", verdict.general),
        )
        if difference is not None
    ]
    return ", ".join([verdict.reason, *parts])
