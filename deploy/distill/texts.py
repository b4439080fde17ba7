"""Generates answers of the target, with its likeliest tokens at each position, and keeps them on disk in batches.

A drafter is trained on texts that its target generates, as in DistillSpec and online speculative decoding. A batch is
one file, written whole or not at all, so that an interrupted run goes on with the next batch. The first answer to a
prompt is greedy, others are drawn at temperature 1. Some prompts are held out, and acceptance is measured on them.
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
"""A batch is chosen from this many times as many texts."""


@dataclass(frozen=True)
class Job:
    """Describes a batch of prompts that are answered together."""

    number: int
    sample: int
    prompts: tuple[int, ...]
    held_out: bool = False
    """Whether its answers are not trained on."""


def held_out(digests: Sequence[str]) -> set[int]:
    """Returns the indices of prompts that are held out. The choice depends on the prompts' contents alone."""
    order = sorted(set(digests), key=lambda digest: hashlib.sha256(f"held out {digest}".encode()).digest())
    chosen = order[: min(max(2, round(len(order) * HELD_OUT_SHARE)), HELD_OUT_MOST)]
    return {index for index, digest in enumerate(digests) if digest in chosen}


def plan(num_prompts: int, kept_out: set[int], samples: int, batch_size: int, seed: int) -> list[Job]:
    """Returns the batches to generate: greedy answers of held-out prompts, then all samples of the others, shuffled."""
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
    """Keeps batches of texts in a directory."""

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
    """Yields the target's answers by batch. prompts: token ids of all prompts."""
    with OfflineAnswers(engine) as generator:
        for job in tqdm(jobs, "generating text", unit="batch"):
            asked = [prompts[index] for index in job.prompts]
            drawn = None if job.sample == 0 else seed * 1_000_003 + job.number
            yield job, texts_of(job, asked, generator.of(asked, max_tokens, drawn))


def texts_of(job: Job, prompts: Sequence[list[int]], answers: Sequence[Answer]) -> list[Text]:
    """Returns the texts of a batch. prompts: token ids of its prompts."""
    texts = []
    for index, prompt, answer in zip(job.prompts, prompts, answers, strict=True):
        ids, top_ids = np.array(prompt + answer.token_ids, np.int32), answer.top_ids.astype(np.int32)
        texts.append(Text(index, job.sample, ids, len(prompt), top_ids, answer.top_log_p.astype(np.float16)))
    return texts


def alike(texts: Sequence[Text], size: int, chance: random.Random) -> list[Text]:
    """Draws texts of nearly the same length, so that a batch has little padding. Each text is equally likely."""
    size = min(size, len(texts))
    drawn = chance.sample(texts, min(DRAWN, len(texts) // size) * size)
    start = chance.randrange(len(drawn) // size) * size
    return sorted(drawn, key=lambda text: len(text.ids))[start : start + size]
