"""`outrider distill`, from prompts to a drafter that loads: text, training, the stored form, the assembled checkpoint.

Everything is in one directory: ``run.json`` (what decides the outcome; a resumed run must agree), ``texts``,
``clock.json`` (what they took), ``checkpoints``, ``progress.jsonl``, and at the end ``drafter`` (stored), ``model``
(assembled) and ``curve.png``.
"""

from __future__ import annotations

import fcntl
import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.actors.learning import draft_models
from outrider.actors.learning.text import TOP, Text
from outrider.actors.vllm_seam.offline_answers import TOGETHER, Engine, OfflineAnswers
from outrider.cluster.config import ConfigError
from outrider.cluster.whole_files import whole_file
from outrider.deploy.bench.machine import machine, versions
from outrider.deploy.distill import models, stored
from outrider.deploy.distill.checkpoint import Checkpoints
from outrider.deploy.distill.plot import can_draw, draw_course
from outrider.deploy.distill.prompts import PromptFile, read_prompts, tokens_of
from outrider.deploy.distill.texts import Job, TextStore, held_out, plan, texts_of
from outrider.deploy.models.identity import Reference
from outrider.deploy.progress import Progress

if TYPE_CHECKING:
    import torch

    from outrider.actors.learning.train import Held, Trainer

_CLOCK = "clock.json"
SAVE_EVERY_S = 60.0
SAY_EVERY_S = 10.0
EVALUATIONS = 16
"""In a whole training, besides the first and the last."""

TEXT_SHARE = 0.4
"""Of the minutes, and of those that are left, at most: generating text. What is there by then is trained on."""


@dataclass(frozen=True)
class Settings:
    target: str
    data: tuple[Path, ...]
    out: Path
    layers: int | None
    start: str | None
    """The drafter to train further; None: the target's own layers."""

    minutes: float | None
    steps: int | None
    """One of the two."""

    seq_len: int
    answer_tokens: int
    samples: int
    chat: bool
    draft_vocab_size: int | None
    learning_rate: float
    batch_size: int
    seed: int
    device: str
    dtype: str
    own_share: float
    """Of the steps: on the drafter's own tokens too."""

    bits: int
    """Of a stored matrix's value: 16 or 8."""


@dataclass
class Clock:
    """Seconds of all runs together."""

    before_s: float
    budget_s: float | None
    steps: int | None
    text_s: float = 0.0
    """Of them: generating text."""

    def __post_init__(self) -> None:
        self._start = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return self.before_s + time.monotonic() - self._start

    def text_until_s(self) -> float | None:
        """When to stop generating text: what earlier runs took of its share is gone. None: when all is there."""
        if self.budget_s is None:
            return None
        share_s = min(TEXT_SHARE * self.budget_s - self.text_s, TEXT_SHARE * (self.budget_s - self.elapsed_s))
        return self.elapsed_s + max(share_s, 0.0)

    def done(self, step: int) -> float:
        """The share of the training, of which text is no part, that is over: 1 when the budget is used up."""
        if self.steps is not None:
            return step / self.steps
        assert self.budget_s is not None
        left_s = self.budget_s - self.elapsed_s
        return 1.0 if left_s <= 0 else 1.0 - left_s / (self.budget_s - self.text_s)


def distill(settings: Settings, progress: Progress) -> Path:
    """Returns the assembled checkpoint's directory. Raises ConfigError."""
    try:
        settings.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out: {settings.out} cannot be made ({error.strerror}); write elsewhere") from None
    with _alone(settings.out):
        return _Run(settings, progress).run()


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    with (out / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"--out: another run is at work in {out}; wait for it, or choose another") from None
        yield


class _Run:
    def __init__(self, settings: Settings, progress: Progress) -> None:
        """Reads and checks everything that can be wrong before a model is loaded."""
        self._settings, self._progress = settings, progress
        self._files = [read_prompts(path) for path in settings.data]
        self._prompts = [prompt for file in self._files for prompt in file.prompts]
        if len({prompt.digest for prompt in self._prompts}) < 4:
            raise ConfigError("--data: fewer than four different prompts; some are held out, so give more")
        self._target = models.locate(settings.target, "TARGET")
        document = self._document = models.check_architecture(self._target, "TARGET")
        self._start = models.locate(settings.start, "--from") if settings.start else None
        self._layers: list[int] = []
        if self._start is None:
            self._layers = models.choose_layers(int(document["num_hidden_layers"]), settings.layers or 2)
            self._config = models.config_of_layers(document, self._layers)
        else:
            self._config = models.check_architecture(self._start, "--from")
            models.check_same_words(self._target, self._start)
        limit = document.get("max_position_embeddings")
        if isinstance(limit, int) and settings.seq_len > limit:
            raise ConfigError(f"--seq-len: {settings.seq_len}, the target was made for {limit} positions; set fewer")
        self._tokens = tokens_of(
            self._prompts,
            models.load_tokenizer(self._target),
            settings.seq_len - settings.answer_tokens,
            settings.chat,
            "shorten or remove it, or raise --seq-len",
            "--data",
        )
        self._held_out = held_out([prompt.digest for prompt in self._prompts])
        progress.say(f"{len(self._prompts)} prompts, {len(self._held_out)} of them held out")
        with progress.stage("read the target's digest"):
            self._reference = Reference.of(self._target)
        # What is trained further may have the target's own embeddings, as every drafter made here has.
        own = self._start is not None and not models.same_embeddings(self._target, self._start)
        self._base_checkpoint = self._start if own and self._start else self._target
        start = None if self._start is None else Reference.of(self._start)
        self._base = start if own and start else self._reference
        self._agree(_decisive(settings, self._files, self._reference, start))
        self._checkpoints = Checkpoints(settings.out / "checkpoints")
        self._log = settings.out / "progress.jsonl"

    def run(self) -> Path:
        import torch

        saved = self._checkpoints.latest()
        state = None if saved is None else self._checkpoints.load(saved)
        about = {} if state is None else state[2]
        clock = self._clock(about)
        device, dtype = device_of(self._settings.device), dtype_of(self._settings.dtype, self._settings.device)
        target = draft_models.load(self._target, dtype, device)
        engine = Engine(
            str(self._target),
            self._document,
            str(dtype).removeprefix("torch."),
            device,
            self._settings.seq_len,
            min(TOP, int(self._document["vocab_size"])),
            tuple(sorted(draft_models.end_tokens(target))),
        )
        train, held = self._texts(engine, clock)
        if self._start is None:
            drafter = models.from_layers(target, self._layers).to(torch.device(device))
        else:
            drafter = draft_models.load(self._start, torch.float32, device)
        from outrider.actors.learning.train import Recipe, Trainer, vocabulary_for

        named = vocabulary_for(train, self._settings.draft_vocab_size, drafter, target)
        if state is not None and "draft_vocabulary" in about:
            named = torch.tensor(about["draft_vocabulary"])
        settings = self._settings
        recipe = Recipe(settings.seed, settings.learning_rate, settings.batch_size, settings.own_share)
        trainer = Trainer(drafter, target, draft_models.freeze(drafter, dtype), recipe, dtype, named)
        if state is not None:
            trainer.restore(state[0], state[1])
            self._progress.say(f"going on from step {about['step']}, {clock.elapsed_s / 60:.1f} minutes in")
        step = self._train(trainer, train, held, clock, int(about.get("step", 0)))
        return self._finish(trainer, held, clock, step, named)

    def _clock(self, about: dict[str, Any]) -> Clock:
        """As it stood at the last checkpoint, or at a later batch of text. about: the checkpoint's."""
        file = self._settings.out / _CLOCK
        kept = [about] + ([json.loads(file.read_text())] if file.exists() else [])
        last = max(kept, key=lambda each: float(each.get("elapsed_s", 0.0)))
        before_s, text_s = (float(last.get(key, 0.0)) for key in ("elapsed_s", "text_s"))
        budget_s = None if self._settings.minutes is None else self._settings.minutes * 60
        return Clock(before_s, budget_s, self._settings.steps, text_s)

    def _agree(self, decisive: dict[str, Any]) -> None:
        """Raise ConfigError where the directory is of a run with other settings."""
        file = self._settings.out / "run.json"
        decisive = json.loads(json.dumps(decisive))
        if file.exists():
            known = json.loads(file.read_text())
            if other := [key for key in decisive if _nameless(known.get(key)) != _nameless(decisive[key])]:
                shown = "; ".join(f"{key} {_short(known.get(key))}, now {_short(decisive[key])}" for key in other)
                raise ConfigError(
                    f"--out: {self._settings.out} holds a run with other settings ({shown}); choose another directory, "
                    "or the same settings to go on with it"
                )
            return
        with whole_file(file) as work:
            work.write_text(json.dumps(decisive, indent=1) + "\n")

    def _texts(self, engine: Engine, clock: Clock) -> tuple[list[Text], list[Text]]:
        """Those to train on, and those that acceptance is measured on."""
        store = TextStore(self._settings.out / "texts")
        jobs = plan(len(self._prompts), self._held_out, self._settings.samples, TOGETHER, self._settings.seed)
        least = 1 + next(job.number for job in jobs if job.prompts[0] not in self._held_out)
        until = clock.text_until_s()
        began_s = clock.elapsed_s
        if any(not store.has(job) for job in jobs):
            self._progress.say("starting the engine that generates text")
            with OfflineAnswers(engine) as generator:
                self._generate(generator, store, jobs, least, until, clock)
        clock.text_s += clock.elapsed_s - began_s
        texts = [text for job in jobs if store.has(job) for text in store.load(job)]
        train = [text for text in texts if text.prompt not in self._held_out]
        held = [text for text in texts if text.prompt in self._held_out]
        answers = sum(len(text.ids) - text.start for text in train)
        self._progress.say(f"{len(train)} texts to train on, {answers} tokens of answers; {len(held)} held out")
        return train, held

    def _generate(
        self, answers: OfflineAnswers, store: TextStore, jobs: list[Job], least: int, until: float | None, clock: Clock
    ) -> None:
        """What is not there yet, but of jobs from `least` on none that would begin after `until`, of the clock."""
        tokens, began_s = 0, clock.elapsed_s
        for job in jobs:
            if store.has(job):
                continue
            if until is not None and job.number >= least and clock.elapsed_s > until:
                self._progress.say(f"{len(jobs) - job.number} of {len(jobs)} batches of text are left out for time")
                break
            prompts = [self._tokens[index] for index in job.prompts]
            seed = None if job.sample == 0 else self._settings.seed * 1_000_003 + job.number
            made = texts_of(job, prompts, answers.of(prompts, self._settings.answer_tokens, seed))
            store.save(job, made)
            with whole_file(self._settings.out / _CLOCK) as work:
                now_s = clock.elapsed_s
                work.write_text(json.dumps({"elapsed_s": now_s, "text_s": clock.text_s + now_s - began_s}) + "\n")
            tokens += sum(len(text.ids) - text.start for text in made)
            self._progress.wait("generating:", f"batch {job.number + 1} of {len(jobs)}, {tokens} tokens of answers")

    def _train(self, trainer: Trainer, train: list[Text], held: list[Text], clock: Clock, step: int) -> int:
        """Until the budget is used up. Returns the last step."""
        from outrider.actors.learning.train import rate_at

        rows = [row for row in self._read_log() if row["step"] <= step]
        if not rows:
            rows = [self._row(step, clock, [], trainer.evaluate(held))]
        self._write_log(rows)
        if step == 0:
            self._save(trainer, clock, step)  # the minutes that the text took count, whatever happens now
        saved_at = said_at = clock.elapsed_s
        losses, first = [], clock.done(step)
        shown = first
        while clock.done(step) < 1.0:
            loss, _ = trainer.step(step, rate_at(clock.done(step)), train)
            if math.isfinite(loss):
                losses.append(loss)
            step += 1
            if clock.elapsed_s - said_at > SAY_EVERY_S and losses:
                recent = losses[-20:]
                self._progress.say(f"step {step}, loss {sum(recent) / len(recent):.3f}")
                said_at = clock.elapsed_s
            done = clock.done(step)
            if done - shown >= (1 - first) / EVALUATIONS or done >= 1.0:
                rows.append(self._row(step, clock, losses, trainer.evaluate(held)))
                self._write_log(rows)
                shown, losses, said_at = done, [], clock.elapsed_s
                if trainer.skipped:
                    self._progress.say(f"{trainer.skipped} steps so far had no finite gradient and changed nothing")
            if clock.elapsed_s - saved_at > SAVE_EVERY_S:
                self._save(trainer, clock, step)
                saved_at = clock.elapsed_s
        self._save(trainer, clock, step)
        return step

    def _row(self, step: int, clock: Clock, losses: list[float], held: Held) -> dict[str, Any]:
        tally = held.tally
        row = {
            "step": step,
            "minutes": round(clock.elapsed_s / 60, 3),
            "done": clock.done(step),
            "loss": sum(losses) / len(losses) if losses else None,
            "acceptance_rate": tally.acceptance_rate,
            "tokens_per_round": tally.tokens_per_round,
            "by_position": tally.by_position,
            "overlap": held.overlap,
        }
        by_position = ", ".join("-" if share is None else f"{share:.3f}" for share in tally.by_position)
        self._progress.say(
            f"step {step}: held out, greedy, K = {tally.k}: {tally.acceptance_rate:.3f} of all drafts accepted, by "
            f"position {by_position}; {tally.tokens_per_round - 1:.2f} a round"
            + (f"; loss {row['loss']:.3f}" if row["loss"] is not None else "")
        )
        return row

    def _read_log(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._log.read_text().splitlines()] if self._log.exists() else []

    def _write_log(self, rows: list[dict[str, Any]]) -> None:
        with whole_file(self._log) as work:
            work.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def _save(self, trainer: Trainer, clock: Clock, step: int) -> None:
        tensors, optimizer = trainer.state()
        about: dict[str, Any] = {"elapsed_s": clock.elapsed_s, "text_s": clock.text_s}
        if trainer.named_ids is not None:
            about["draft_vocabulary"] = trainer.named_ids.tolist()
        self._checkpoints.save(step, self._config, tensors, optimizer, about)

    def _finish(self, trainer: Trainer, held: list[Text], clock: Clock, step: int, named: torch.Tensor | None) -> Path:
        out, rows = self._settings.out, self._read_log()
        last = rows[-1]
        made = {
            **json.loads((out / "run.json").read_text()),
            "steps": step,
            "minutes": round(clock.elapsed_s / 60, 2),
            "layers_of_target": self._layers,
            "held_out": {"answers": len(held), "k": len(last["by_position"]), "first": rows[0], "last": last},
            "dtype": self._settings.dtype,
            "bits": self._settings.bits,
            "machine": machine(()),
            "versions": versions(),
        }
        stored.store(
            out / "drafter",
            self._reference,
            self._base,
            self._base_checkpoint,
            self._config,
            trainer.state()[0],
            made,
            None if named is None else named.tolist(),
            self._settings.bits,
        )
        stored.assemble(out / "drafter", self._target, out / "model", self._base_checkpoint, self._reference)
        if can_draw():
            draw_course(rows, f"{self._target.name}, {step} steps", out / "curve.png")
        else:
            self._progress.say("no picture: matplotlib is not installed; pip install 'outrider[bench]'")
        size = (out / "drafter" / stored.TENSORS).stat().st_size
        self._progress.say(f"stored in {out / 'drafter'} ({size / 1e6:.1f} MB), assembled in {out / 'model'}")
        return out / "model"


def _decisive(
    settings: Settings, files: list[PromptFile], target: Reference, start: Reference | None
) -> dict[str, Any]:
    keys = (
        "layers", "seq_len", "answer_tokens", "samples", "chat", "draft_vocab_size", "learning_rate", "batch_size",
        "seed", "own_share",
    )  # fmt: skip
    data = [{"name": file.path.name, "sha256": file.sha256, "prompts": len(file.prompts)} for file in files]
    return {
        "target": asdict(target),
        "from": None if start is None else asdict(start),
        "data": data,
        **{key: getattr(settings, key) for key in keys},
    }


def _nameless(value: Any) -> Any:
    """Checkpoints and files are what they hold, whatever they are called now."""
    if isinstance(value, list):
        return [_nameless(each) for each in value]
    return {key: each for key, each in value.items() if key != "name"} if isinstance(value, dict) else value


def _short(value: Any) -> str:
    if isinstance(value, dict) and "name" in value:
        digest = value.get("weights_sha256") or value.get("sha256") or ""
        return f"{value['name']} ({digest[:8]})"
    if isinstance(value, list):
        return ", ".join(map(_short, value))
    return str(value)


def device_of(device: str) -> str:
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"--device: {device}, and PyTorch sees no GPU here; leave it out, or set cpu")
    return device


def dtype_of(dtype: str, device: str) -> torch.dtype:
    """auto: what the device is fastest with."""
    import torch

    from outrider.actors.learning.train import fastest_dtype

    if dtype == "auto":
        return fastest_dtype(device_of(device))
    chosen: torch.dtype = getattr(torch, dtype)
    return chosen
