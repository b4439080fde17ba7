"""Answers of the target's own, with its likeliest tokens at each position, kept on disk batch by batch.

A drafter is to agree with what this target says, not with what somebody else wrote: it is trained on texts that the
target generates (as DistillSpec and online speculative decoding do). A batch is one file, written whole or not at all,
so a run that is interrupted goes on with the next batch. A prompt's first answer is greedy, others are drawn at
temperature 1. Of some prompts no answer is trained on: acceptance is measured on theirs.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from outrider.actors.learning.texts import HELD_OUT, Text, read_texts
from outrider.actors.vllm_adapter.offline_answers import Answer, Engine, OfflineAnswers
from outrider.cluster.whole_files import whole_file

HELD_OUT_SHARE = 0.05
HELD_OUT_MOST = 64

DRAWN = 8
"""Times as many texts as a batch has, to choose it from."""


@dataclass(frozen=True)
class Job:
    """One batch of prompts that are answered together."""

    number: int
    sample: int
    prompts: tuple[int, ...]
    held_out: bool = False
    """No answer of theirs is trained on."""


def held_out(digests: Sequence[str]) -> set[int]:
    """Which prompts are not trained on: by their content alone, so that it is the same whatever is beside them. Of
    equal prompts all or none are."""
    order = sorted(set(digests), key=lambda digest: hashlib.sha256(f"held out {digest}".encode()).digest())
    chosen = order[: min(max(2, round(len(order) * HELD_OUT_SHARE)), HELD_OUT_MOST)]
    return {index for index, digest in enumerate(digests) if digest in chosen}


def plan(num_prompts: int, kept_out: set[int], samples: int, batch_size: int, seed: int) -> list[Job]:
    """What to generate, in this order: greedy answers of the held-out prompts, then of the others, shuffled, as often
    as asked for."""
    others = [index for index in range(num_prompts) if index not in kept_out]
    jobs: list[Job] = []
    every = [(0, True, sorted(kept_out)), *((sample, False, others) for sample in range(samples))]
    for sample, is_held_out, chosen in every:
        order = list(chosen)
        random.Random(f"{seed}:{sample}").shuffle(order)
        for at in range(0, len(order), batch_size):
            jobs.append(Job(len(jobs), sample, tuple(order[at : at + batch_size]), is_held_out))
    return jobs


class TextStore:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def has(self, job: Job) -> bool:
        return self._file(job).exists()

    def save(self, job: Job, texts: list[Text]) -> None:
        from safetensors.numpy import save_file

        arrays = {
            "ids": np.concatenate([text.ids for text in texts]),
            "lengths": np.array([len(text.ids) for text in texts]),
            "starts": np.array([text.start for text in texts]),
            "prompts": np.array([text.prompt for text in texts]),
            "top_ids": np.concatenate([text.top_ids for text in texts]),
            "top_log_p": np.concatenate([text.top_log_p for text in texts]),
        }
        with whole_file(self._file(job)) as file:
            save_file(arrays, file, {HELD_OUT: str(job.held_out).lower()})

    def load(self, job: Job) -> Iterator[Text]:
        return read_texts(self._file(job), job.sample)

    def _file(self, job: Job) -> Path:
        return self._directory / f"batch-{job.number:06d}.safetensors"


def answered(
    engine: Engine, jobs: Sequence[Job], prompts: Sequence[list[int]], max_tokens: int, seed: int
) -> Iterator[tuple[Job, list[Text]]]:
    """The target's answers, batch by batch. prompts: tokens of all of them."""
    with OfflineAnswers(engine) as generator:
        for job in tqdm(jobs, "generating text", unit="batch"):
            asked = [prompts[index] for index in job.prompts]
            drawn = None if job.sample == 0 else seed * 1_000_003 + job.number
            yield job, texts_of(job, asked, generator.of(asked, max_tokens, drawn))


def texts_of(job: Job, prompts: Sequence[list[int]], answers: Sequence[Answer]) -> list[Text]:
    """prompts: of the job."""
    texts = []
    for index, prompt, answer in zip(job.prompts, prompts, answers, strict=True):
        ids, top_ids = np.array(prompt + answer.token_ids, np.int32), answer.top_ids.astype(np.int32)
        texts.append(Text(index, job.sample, ids, len(prompt), top_ids, answer.top_log_p.astype(np.float16)))
    return texts


def alike(texts: Sequence[Text], size: int, chance: random.Random) -> list[Text]:
    """Draws so many of the texts, of nearly one length, so that little of a batch is padding; any is as likely."""
    size = min(size, len(texts))
    drawn = chance.sample(texts, min(DRAWN, len(texts) // size) * size)
    start = chance.randrange(len(drawn) // size) * size
    return sorted(drawn, key=lambda text: len(text.ids))[start : start + size]
