"""The Ray actor that trains: it takes what drafters were taught, and says which version is to serve.

It works at the lowest priority, on cores or an accelerator of its own. Losing it costs what it learned since the last
version on disk, and nothing else.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from outrider.actors.drafter.shared_actor import IDLE_LIFE_S, IdleLife
from outrider.actors.learning.gate import LEAST_TEXTS
from outrider.actors.learning.learner import Learner, Learnt
from outrider.actors.learning.lessons import Taught
from outrider.actors.learning.versions import VersionStore, sampled_digest
from outrider.actors.observability.logs import configure as configure_logging
from outrider.cluster.learning_config import LearningConfig
from outrider.cluster.link.messages import TAUGHT_TOP
from outrider.cluster.placement import bind_to

if TYPE_CHECKING:
    from torch import Tensor

    from outrider.actors.learning.text import Text

logger = logging.getLogger(__name__)

LEAST_GENERAL = 2 * LEAST_TEXTS
"""Prompts of general texts: every other one's to compare versions on, the rest to train on."""

MOMENT_S = 1.0
"""A drafter that has had nothing to do for so long is idle: between two rounds of a request it is not."""

FORGOTTEN_S = 5.0
"""A drafter that has not been heard of for so long is gone, or hands over nothing."""

_PAUSE_S = 0.5
_LOWEST_PRIORITY = 19
_LONG_IDLE_LIFE_S = 1800.0
"""Where what was learned is in memory alone. A sole drafter that comes back may have had to wait for a node."""


@dataclass(frozen=True)
class Report:
    """What a drafter says of itself. drafter: the same after a restart, unlike life. held: the version that it has
    dealt with last, by trainer and number; None: it drafts as it was loaded. refused: likewise, the last that it could
    not load. idle_s: see IdleTime.heard."""

    drafter: str
    life: str
    held: tuple[str, int] | None = None
    refused: tuple[str, int] | None = None
    idle_s: float | None = None


@dataclass
class Update:
    """version: trainer and number of what is to serve. base: sampled_digest of the checkpoint that it was learned from.
    tensors: a reference to them, in a list lest Ray fetch it, where the drafter holds another version; else empty."""

    version: tuple[str, int]
    base: str
    figures: dict[str, Any]
    tensors: list[Any] = field(default_factory=list)


_MOST_DEATHS = 2
"""Lives of a drafter that may end while it takes a version: once may have had any reason."""


@dataclass
class _Taking:
    """A version that a drafter was given, and has not said yet that it drafts with. deaths: lives that ended so."""

    version: tuple[str, int]
    life: str
    deaths: int = 0


class HandOut:
    """What drafters bring and take. A version that a drafter could not load is not given to it again, nor one that has
    ended it `_MOST_DEATHS` times: it would meet it at each restart."""

    def __init__(self, learner: Learner, base: str, put: Callable[[dict[str, Tensor]], Any]) -> None:
        """base, put: the digest and a reference to tensors, as Update has them."""
        self._learner, self._base, self._put = learner, base, put
        self._last: tuple[Learnt, Any] | None = None
        self._taking: dict[str, _Taking] = {}
        """By drafter."""

        self._barred: dict[str, tuple[str, int]] = {}
        """By drafter: the last version that it is not to be given."""

    def exchange(self, report: Report, taught: list[Taught], **figures: Any) -> Update:
        """figures: beside the learner's."""
        self._learner.add(taught)
        serving = self._learner.serving
        version = (serving.version.learner, serving.version.number)
        update = Update(version, self._base, {**self._learner.figures(), **figures})
        self._hear(report)
        held = report.held
        if held != version and not (held is None and version[1] == 0) and self._barred.get(report.drafter) != version:
            if self._last is None or self._last[0] is not serving:
                self._last = serving, self._put(dict(serving.tensors))
            update.tensors = [self._last[1]]
            taking = self._taking.get(report.drafter)
            if taking is None or taking.version != version:
                self._taking[report.drafter] = _Taking(version, report.life)
        return update

    def _hear(self, report: Report) -> None:
        if report.refused is not None:
            self._barred[report.drafter] = report.refused
        taking = self._taking.get(report.drafter)
        if taking is None:
            return
        if report.held == taking.version:
            del self._taking[report.drafter]
        elif report.life != taking.life:
            taking.life, taking.deaths = report.life, taking.deaths + 1
            if taking.deaths >= _MOST_DEATHS:
                logger.error(
                    "drafter %s has ended %d times on version %s", report.drafter, taking.deaths, taking.version
                )
                self._barred[report.drafter] = taking.version
                del self._taking[report.drafter]


class OnDisk:
    """Versions that served, whatever becomes of this process. Any thread; counts, and never raises: learning goes on in
    memory, whatever the disk or its library does."""

    def __init__(self, learner: Learner, store: VersionStore | None) -> None:
        """store: None: nothing is kept."""
        self._learner, self._store = learner, store
        self._saved = learner.serving.version
        self.failures = 0

    def save(self) -> None:
        """What serves, where it is not there yet."""
        serving = self._learner.serving
        if self._store is None or serving.version == self._saved:
            return
        self._saved = serving.version
        try:
            self._store.save(serving.version.number, serving.tensors, self._learner.figures())
        except Exception as error:  # noqa: BLE001 - see above
            self._failed(serving.version.number, error)

    def went_back(self, number: int, serving: int) -> None:
        """See VersionStore.leave. Writing the version itself takes longer than anybody waits for an answer."""
        if self._store is None:
            return
        try:
            self._store.leave(number, serving)
        except Exception as error:  # noqa: BLE001 - see above
            self._failed(serving, error)

    def _failed(self, number: int, error: Exception) -> None:
        self.failures += 1
        logger.error("drafter.learn.directory: version %d is not kept: %s", number, error)


class IdleTime:
    """Whether drafters have so little to do that their cores can be trained on. Any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._heard: dict[str, tuple[float, bool]] = {}
        """By drafter: when, and whether it was idle."""

    def heard(self, drafter: str, idle_s: float | None) -> None:
        """idle_s: for how long it has had nothing to do; None: it has."""
        self._heard[drafter] = self._clock(), idle_s is not None and idle_s >= MOMENT_S

    @property
    def is_now(self) -> bool:
        """All drafters that are there are idle."""
        now = self._clock()
        return all(idle for at, idle in list(self._heard.values()) if now - at < FORGOTTEN_S)


class DrafterTrainer:
    """Loads the draft model at construction."""

    def __init__(self, model: str, revision: str | None, settings: LearningConfig) -> None:
        configure_logging()
        os.nice(_LOWEST_PRIORITY)
        if settings.cores is not None:
            bind_to(settings.cores)
        import torch

        from outrider.actors.learning.draft_models import load
        from outrider.actors.learning.memory import ParameterCounts, check_fits
        from outrider.actors.learning.train import fastest_dtype

        gpu = settings.num_gpus > 0
        if not gpu:
            torch.set_num_threads(len(settings.cores or [0]))
        base = local_copy(model, revision)
        device = "cuda" if gpu else "cpu"
        dtype = fastest_dtype(device)
        if gpu:
            check_fits(ParameterCounts.of(base), dtype.itemsize, torch.cuda.mem_get_info()[0], "the trainer's GPU")
        drafter = load(base, torch.float32, device)
        self._learner = Learner(
            drafter,
            settings,
            dtype=dtype,
            kept_dtype=_written_as(base),
            general=general_texts(
                settings.general, settings.max_text_tokens, int(drafter.get_output_embeddings().weight.shape[0])
            ),
        )
        store: VersionStore | None = None
        if settings.directory is not None:
            store = VersionStore(Path(settings.directory).expanduser(), base, settings.kept_versions)
            self._learner.count_from(store.highest())
            if (found := store.latest(set(self._learner.serving.tensors))) is not None:
                self._learner.resume(*found)
        self._hand_out = HandOut(self._learner, sampled_digest(base), ray.put)
        self._idle = IdleTime() if settings.when == "idle" else None
        self._on_disk = OnDisk(self._learner, store)
        self._life = IdleLife(life_s(settings))
        threading.Thread(target=self._train, name="training", daemon=True).start()

    async def exchange(self, report: Report, taught: list[Taught]) -> Update:
        """See HandOut and IdleTime.heard."""
        self._life.asked()
        if self._idle is not None:
            self._idle.heard(report.drafter, report.idle_s)
        return self._hand_out.exchange(report, taught, store_failures=self._on_disk.failures)

    async def go_back(self, number: int) -> tuple[int | None, str]:
        """See Learner.go_back: the number under which it serves; None, and why not. A restart does not undo it."""
        self._life.asked()
        try:
            serving = self._learner.go_back(number)
        except ValueError as error:
            return None, str(error)
        self._on_disk.went_back(number, serving)
        return serving, ""

    def _train(self) -> None:
        while True:
            try:
                worked = self._learner.turn(may_train=self._idle is None or self._idle.is_now)
            except BaseException:
                # What is in memory may be anything now. Drafters keep what they have until another trainer is there.
                logger.exception("training failed; this trainer ends and will be made anew")
                os._exit(1)
            self._on_disk.save()
            if not worked:
                time.sleep(_PAUSE_S)


def general_texts(directory: str | None, max_text_tokens: int, vocab_size: int) -> list[Text]:
    """Those that are short enough and that a drafter of so many tokens can read, with as many of the target's likeliest
    tokens as lessons have. They may be greedy or drawn, so they are measured as if drawn. Raises OSError, also where
    there are too few to tell a loss by, and what safetensors raises."""
    from outrider.actors.learning.text import read_texts

    if directory is None:
        return []
    files = sorted(Path(directory).expanduser().glob("batch-*.safetensors"))
    texts = [
        replace(text, top_ids=text.top_ids[:, :TAUGHT_TOP], top_log_p=text.top_log_p[:, :TAUGHT_TOP])
        for file in files
        for text in read_texts(file, sample=1)
        if len(text.ids) <= max_text_tokens and int(text.ids.max()) < vocab_size
    ]
    fitting = len({text.prompt for text in texts})
    if fitting < LEAST_GENERAL:
        found = (
            f"its {len(files)} files hold texts to {fitting} prompts that fit, {LEAST_GENERAL} are needed"
            if files
            else "it has no batch-*.safetensors"
        )
        raise FileNotFoundError(
            f"drafter.learn.general: {directory} protects nothing on this node: {found}; give OUT/texts of `outrider "
            "distill` on every node where the trainer may run, or leave it out"
        )
    return texts


def life_s(settings: LearningConfig) -> float:
    """How long a trainer that nobody asks stays: it holds its cores or its GPU for as long."""
    return _LONG_IDLE_LIFE_S if settings.directory is None else IDLE_LIFE_S


def local_copy(model: str, revision: str | None) -> Path:
    """A checkpoint's directory; a hub id's is fetched where it is missing. Raises what the hub's client raises."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, revision=revision))


def _written_as(checkpoint: Path) -> Any:
    """The dtype of its layers."""
    from outrider.actors.learning.draft_models import tensors_of

    return next(tensor.dtype for name, tensor in tensors_of(checkpoint) if name.startswith("model.layers."))
