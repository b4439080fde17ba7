"""Runs ``outrider distill``: generates texts, trains a drafter on them, stores and assembles it.

A drafter is of one of the kinds that `Trainer` has subclasses for.

All files are in one directory: ``run.json`` (the settings, in which a resumed run must agree), ``texts``,
``checkpoints``, and at the end ``progress.jsonl``, ``drafter`` (stored) and ``model`` (assembled).
"""

from __future__ import annotations

import json
import math
import random
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from outrider.actors.learning import draft_models
from outrider.actors.learning.texts import Text
from outrider.actors.vllm_adapter.offline_answers import TOGETHER, Engine
from outrider.cluster.config import ConfigError
from outrider.cluster.vocabulary import MASK_TOKENS, mask_token
from outrider.cluster.whole_files import UNFINISHED, whole_directory, whole_file
from outrider.deploy.bench.machine import machine, versions
from outrider.deploy.distill import models, stored
from outrider.deploy.distill.prompts import read_prompts, tokens_of
from outrider.deploy.distill.rounds import Measured, measured
from outrider.deploy.distill.texts import TextStore, alike, answered, held_out, plan
from outrider.deploy.models.identity import Reference
from outrider.deploy.models.store import read_manifest, write_manifest
from outrider.deploy.progress import Progress

if TYPE_CHECKING:
    import torch

    from outrider.actors.learning.train import Trainer

SAVE_EVERY_S = 60.0
EVALUATIONS = 16
"""Number of evaluations during a whole training."""

WARM_UP = 0.05
"""Share of the training in which the learning rate rises."""

ONE_PASS, MLP = "one_pass", "mlp"
"""Kinds of drafters; the other one is draft_model."""

_TENSORS, _OPTIMIZER = "trained.safetensors", "optimizer.pt"


@dataclass(frozen=True)
class Settings:
    """Holds the settings of a run, as on the command line."""

    target: str
    data: tuple[Path, ...]
    out: Path
    kind: str  # draft_model, one_pass or mlp
    k: int  # drafts a round: the heads of an MLP speculator, what a one-pass drafter is trained for
    layers: int | None
    start: str | None  # the drafter to train further; None: the target's own layers
    steps: int
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
    bits: int  # of a stored matrix's value: 16 or 8


def distill(settings: Settings, progress: Progress) -> Path:
    """Trains a drafter and returns the directory of the assembled checkpoint. Raises ConfigError."""
    settings.out.mkdir(parents=True, exist_ok=True)
    return _Run(settings, progress).run()


class _Run:
    def __init__(self, settings: Settings, progress: Progress) -> None:
        """Reads the inputs and checks them before a model is loaded. Raises ConfigError."""
        self._settings, self._progress = settings, progress
        self._files = [read_prompts(path) for path in settings.data]
        prompts = [prompt for file in self._files for prompt in file.prompts]
        if len({prompt.digest for prompt in prompts}) < 4:
            raise ConfigError("--data: fewer than four different prompts; some are held out, so give more")
        self._target = models.locate(settings.target, "TARGET")
        document = self._document = models.check_architecture(self._target, "TARGET")
        self._start = models.locate(settings.start, "--from") if settings.start else None
        self._layers: list[int] = []
        if settings.kind == MLP:
            if settings.layers or settings.start or settings.draft_vocab_size:
                raise ConfigError("--kind mlp: takes no --layers, --from or --draft-vocab-size; leave them out")
            from outrider.deploy.distill import mlp

            self._config = mlp.config_of(document, settings.k)
        elif self._start is None:
            self._layers = models.choose_layers(int(document["num_hidden_layers"]), settings.layers or 2)
            self._config = models.config_of_layers(document, self._layers)
        else:
            self._config = models.check_architecture(self._start, "--from")
            models.check_same_tokens_of(self._target, self._start)
        room = settings.seq_len - settings.answer_tokens
        self._tokens = tokens_of(prompts, models.load_tokenizer(self._target), room, settings.chat, "--data")
        self._held_out = held_out([prompt.digest for prompt in prompts])
        progress.say(f"{len(prompts)} prompts, {len(self._held_out)} of them held out")
        with progress.stage("read the target's digest"):
            self._reference = Reference.of(self._target)
        self._agree()
        self._checkpoints = settings.out / "checkpoints"

    def run(self) -> Path:
        import torch
        from safetensors.torch import load_file

        settings = self._settings
        device, dtype = models.device_and_dtype(settings.device, settings.dtype)
        engine = models.engine(self._target, self._document, dtype, device, settings.seq_len)
        train, held = self._texts(engine)
        trainer = self._trainer(train, device, dtype)
        about: dict[str, Any] = {}
        if complete := self._complete():
            saved = complete[-1]
            about = read_manifest(saved) or {}
            optimizer = torch.load(saved / _OPTIMIZER, weights_only=True, map_location="cpu")
            trainer.load(load_file(saved / _TENSORS))
            trainer.optimizer.load_state_dict(optimizer)
            self._progress.say(f"going on from step {about['step']}")
        rows = self._train(trainer, train, held, about.get("rows", []), int(about.get("step", 0)))
        return self._finish(trainer, len(held), rows)

    def _trainer(self, texts: list[Text], device: str, dtype: torch.dtype) -> Trainer:
        """Loads the target and makes the drafter. texts: of the training."""
        import torch

        from outrider.actors.learning.train import Trainer
        from outrider.deploy.distill import mlp
        from outrider.deploy.distill.one_pass import OnePassTrainer, choose_mask_token

        settings = self._settings
        target = draft_models.load(self._target, dtype, device)
        if settings.kind == MLP:
            speculator = mlp.from_target(target, self._config, settings.seed)
            return mlp.MLPTrainer(target, speculator, settings.learning_rate, dtype, settings.seed)
        if self._start is None:
            drafter = models.from_layers(target, self._layers).to(torch.device(device))
        else:
            drafter = draft_models.load(self._start, torch.float32, device)
        vocab_size = min(model.get_output_embeddings().weight.shape[0] for model in (drafter, target))
        named = None
        if settings.draft_vocab_size is not None and settings.draft_vocab_size < vocab_size:
            ends = {token for token in models.ends_of(self._target) if token < vocab_size}
            named = models.draft_vocabulary(texts, settings.draft_vocab_size, vocab_size, ends)
        options = settings.learning_rate, dtype, named, settings.seed
        if settings.kind != ONE_PASS:
            for name in MASK_TOKENS:  # of a one-pass drafter that becomes a sequential one
                self._config.pop(name, None)
            return Trainer(drafter, *options)
        if (mask := mask_token(self._config)) is None:
            mask = self._config["pard_token"] = choose_mask_token(self._target, vocab_size, texts)
        return OnePassTrainer(drafter, mask, settings.k, *options)

    def _agree(self) -> None:
        """Raises ConfigError if the directory holds a run with other settings. Files are compared by content."""
        decisive = {
            **asdict(self._settings),
            "target": self._reference.weights_sha256,
            "start": self._start and Reference.of(self._start).weights_sha256,
            "data": [file.sha256 for file in self._files],
        }
        for indifferent in ("out", "steps", "device", "dtype", "bits"):
            del decisive[indifferent]
        file = self._settings.out / "run.json"
        known = json.loads(file.read_text()) if file.exists() else decisive
        if other := [f"{key} {known.get(key)}, now {is_}" for key, is_ in decisive.items() if known.get(key) != is_]:
            raise ConfigError(
                f"--out: {self._settings.out} holds a run with other settings ({'; '.join(other)}); choose another "
                "directory, or the same settings to go on with it"
            )
        with whole_file(file) as work:
            work.write_text(json.dumps(decisive, indent=1) + "\n")

    def _texts(self, engine: Engine) -> tuple[list[Text], list[Text]]:
        """Returns the texts to train on, and the held-out ones."""
        settings, store = self._settings, TextStore(self._settings.out / "texts")
        jobs = plan(len(self._tokens), self._held_out, settings.samples, TOGETHER, settings.seed)
        if missing := [job for job in jobs if not store.has(job)]:
            self._progress.say("starting the engine that generates text")
            for job, made in answered(engine, missing, self._tokens, settings.answer_tokens, settings.seed):
                store.save(job, made)
        texts = [text for job in jobs for text in store.load(job)]
        train = [text for text in texts if text.prompt not in self._held_out]
        held = [text for text in texts if text.prompt in self._held_out]
        answers = sum(len(text.ids) - text.start for text in train)
        self._progress.say(f"{len(train)} texts to train on, {answers} tokens of answers; {len(held)} held out")
        return train, held

    def _train(
        self, trainer: Trainer, train: list[Text], held: list[Text], rows: list[dict[str, Any]], step: int
    ) -> list[dict[str, Any]]:
        """Trains from a step to the last. Returns the rows of all evaluations, after the given ones."""
        steps, losses, saved_at = self._settings.steps, [], time.monotonic()
        if not rows:
            rows = [self._row(step, [], measured(trainer, held, self._settings.k))]
        with tqdm(total=steps, initial=step, desc="training", unit="step") as bar:
            while step < steps:
                batch = alike(train, self._settings.batch_size, random.Random(f"{self._settings.seed}:{step}"))
                loss, _ = trainer.step(step, rate_at(step / steps), batch)
                losses.append(loss)
                step += 1
                bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
                bar.update()
                if step * EVALUATIONS // steps > (step - 1) * EVALUATIONS // steps:
                    rows.append(self._row(step, losses, measured(trainer, held, self._settings.k)))
                    losses = []
                if time.monotonic() - saved_at > SAVE_EVERY_S or step == steps:
                    self._save(trainer, rows, step)
                    saved_at = time.monotonic()
        if trainer.skipped:
            self._progress.say(f"{trainer.skipped} steps had no finite gradient and changed nothing")
        return rows

    def _row(self, step: int, losses: list[float], held: Measured) -> dict[str, Any]:
        tally, finite = held.tallies[-1], [loss for loss in losses if math.isfinite(loss)]
        self._progress.say(f"step {step}: {tally.acceptance_rate:.3f} of held-out drafts accepted, K = {tally.k}")
        return {
            "step": step,
            "loss": sum(finite) / len(finite) if finite else None,
            "acceptance_rate": tally.acceptance_rate,
            "by_position": tally.by_position,
            "overlap": held.overlap,
        }

    def _save(self, trainer: Trainer, rows: list[dict[str, Any]], step: int) -> None:
        """Writes a checkpoint, whole or not at all, and keeps the one before it."""
        import torch
        from safetensors.torch import save_file

        with whole_directory(self._checkpoints / f"step-{step:08d}") as work:
            save_file({name: tensor.cpu().contiguous() for name, tensor in _trained(trainer).items()}, work / _TENSORS)
            torch.save(trainer.optimizer.state_dict(), work / _OPTIMIZER)
            (work / "config.json").write_text(json.dumps(self._config))
            write_manifest(work, {"step": step, "rows": rows})
        for old in self._complete()[:-2]:
            shutil.rmtree(old)

    def _complete(self) -> list[Path]:
        found = [path for path in sorted(self._checkpoints.glob("step-*")) if not path.name.endswith(UNFINISHED)]
        return [path for path in found if read_manifest(path) is not None]

    def _finish(self, trainer: Trainer, num_held_out: int, rows: list[dict[str, Any]]) -> Path:
        out, named = self._settings.out, trainer.named_ids
        with whole_file(out / "progress.jsonl") as work:
            work.write_text("".join(json.dumps(row) + "\n" for row in rows))
        made = {
            **json.loads((out / "run.json").read_text()),
            "data": [{"name": file.path.name, "sha256": file.sha256} for file in self._files],
            "steps": self._settings.steps,
            "layers_of_target": self._layers,
            "held_out": {"answers": num_held_out, "first": rows[0], "last": rows[-1]},
            "dtype": self._settings.dtype,
            "bits": self._settings.bits,
            "machine": machine(()),
            "versions": versions(),
        }
        tensors = _trained(trainer)
        if self._start is not None and not models.same_embeddings(self._target, self._start):
            tensors |= {name: tensor for name, tensor in draft_models.tensors_of(self._start) if name not in tensors}
        vocabulary = None if named is None else named.tolist()
        kept = out / "drafter"
        settings = self._settings
        about = tensors, made, vocabulary, settings.bits, settings.kind != MLP
        stored.store(kept, self._reference, self._target, self._config, *about)
        stored.assemble(kept, self._target, out / "model", self._reference)
        size = (kept / stored.TENSORS).stat().st_size
        self._progress.say(f"stored in {kept} ({size / 1e6:.1f} MB), assembled in {out / 'model'}")
        return out / "model"


def rate_at(done: float) -> float:
    """Returns the factor of the learning rate at a share of the training: a linear rise, then a cosine down to 0.05."""
    if done < WARM_UP:
        return max(done / WARM_UP, 0.02)
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min((done - WARM_UP) / (1 - WARM_UP), 1.0)))


def _trained(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in trainer.trained.items()}
