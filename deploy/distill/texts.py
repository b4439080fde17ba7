"""Answers of the target's own, with its likeliest tokens at each position, kept on disk batch by batch.

A drafter is to agree with what this target says, not with what somebody else wrote: it is trained on texts that the
target generates (as DistillSpec and online speculative decoding do). A batch is one file, written whole or not at all,
so a run that is interrupted goes on with the next batch. A prompt's first answer is greedy, others are drawn at
temperature 1. Of some prompts no answer is trained on: acceptance is measured on theirs.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.actors.learning.draft_models import end_tokens
from outrider.actors.learning.loss import head
from outrider.actors.learning.text import TOP, Text, answer_positions, padded, read_texts
from outrider.cluster.whole_files import UNFINISHED, whole_file

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

HELD_OUT_SHARE = 0.05
HELD_OUT_LEAST, HELD_OUT_MOST = 2, 64

ChooseNext = Callable[["torch.Tensor", "torch.Tensor"], "torch.Tensor"]
"""(logits float32 [B, V], tokens before int64 [B]) -> token ids [B]."""


@dataclass(frozen=True)
class Job:
    """One batch of prompts that are answered together."""

    number: int
    sample: int
    prompts: tuple[int, ...]


def held_out(digests: Sequence[str]) -> set[int]:
    """Which prompts are not trained on: by their content alone, so that it is the same whatever is beside them.
    Of fewer than two prompts none is; of equal prompts all or none are."""
    order = sorted(set(digests), key=lambda digest: hashlib.sha256(f"held out {digest}".encode()).digest())
    count = min(max(HELD_OUT_LEAST, round(len(order) * HELD_OUT_SHARE)), HELD_OUT_MOST, len(order) - 1)
    chosen = set(order[: max(count, 0)])
    return {index for index, digest in enumerate(digests) if digest in chosen}


def plan(num_prompts: int, kept_out: set[int], samples: int, batch_size: int, seed: int) -> list[Job]:
    """What to generate, in this order: greedy answers of the held-out prompts, then of the others, shuffled, as often
    as asked for. As much as there is time for is a fair sample."""
    others = [index for index in range(num_prompts) if index not in kept_out]
    jobs: list[Job] = []
    for sample, chosen in [(0, sorted(kept_out)), *((sample, others) for sample in range(samples))]:
        order = list(chosen)
        random.Random(f"{seed}:{sample}").shuffle(order)
        for at in range(0, len(order), batch_size):
            jobs.append(Job(len(jobs), sample, tuple(order[at : at + batch_size])))
    return jobs


class TextStore:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def has(self, job: Job) -> bool:
        return self._file(job).exists()

    def save(self, job: Job, texts: list[Text]) -> None:
        import torch
        from safetensors.torch import save_file

        tensors = {
            "ids": torch.cat([text.ids for text in texts]).to(torch.int32),
            "lengths": torch.tensor([len(text.ids) for text in texts]),
            "starts": torch.tensor([text.start for text in texts]),
            "prompts": torch.tensor([text.prompt for text in texts]),
            "top_ids": torch.cat([text.top_ids for text in texts]).to(torch.int32),
            "top_log_p": torch.cat([text.top_log_p for text in texts]).to(torch.float16),
        }
        with whole_file(self._file(job)) as file:
            save_file(tensors, file)

    def load(self, job: Job) -> Iterator[Text]:
        return read_texts(self._file(job), job.sample)

    def _file(self, job: Job) -> Path:
        file = self._directory / f"batch-{job.number:06d}.safetensors"
        assert not file.name.endswith(UNFINISHED)
        return file


def generate(
    target: PreTrainedModel,
    prompts: Sequence[list[int]],
    num_tokens: int,
    seed: int | None,
    choose: ChooseNext | None = None,
) -> list[list[int]]:
    """The answers' token ids, with the end token where they end, at least one token each.

    seed: of draws at temperature 1; None: greedy. choose: chooses every token instead.
    """
    import torch
    from transformers import GenerationConfig

    device, pad = target.device, target.generation_config.pad_token_id
    longest = max(map(len, prompts))
    ids = torch.full((len(prompts), longest), pad)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    draws = seed is not None and choose is None
    settings = GenerationConfig(max_new_tokens=num_tokens, do_sample=draws, **({"top_k": 0} if draws else {}))
    if seed is not None and choose is None:
        torch.manual_seed(seed)
    with torch.inference_mode():
        out = target.generate(
            ids.to(device),
            attention_mask=mask.to(device),
            generation_config=settings,
            logits_processor=_chooser(choose, longest - mask.sum(1)) if choose is not None else None,
        )
    ends = end_tokens(target)
    answers = []
    for row in out[:, longest:].tolist():
        stop = next((at + 1 for at, token in enumerate(row) if token in ends), len(row))
        answers.append(row[:stop])
    return answers


def _chooser(choose: ChooseNext, padding: torch.Tensor) -> Any:
    """What makes transformers' greedy search take the chosen tokens. padding: [B], tokens before each prompt."""
    from transformers import LogitsProcessor, LogitsProcessorList

    class Chosen(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            chosen = choose(scores.float().cpu(), input_ids.shape[1] - padding.cpu()).to(scores.device)
            return scores.new_full(scores.shape, float("-inf")).scatter(1, chosen[:, None], 0.0)

    return LogitsProcessorList([Chosen()])


def scored(target: PreTrainedModel, job: Job, prompts: Sequence[list[int]], answers: list[list[int]]) -> list[Text]:
    """Texts with the target's likeliest tokens. prompts: of the job."""
    import torch

    none = torch.empty(0)
    texts = [
        Text(index, job.sample, torch.tensor(prompt + answer), len(prompt), none, none)
        for index, prompt, answer in zip(job.prompts, prompts, answers, strict=True)
    ]
    ids, mask = padded(texts, target.generation_config.pad_token_id)
    rows, places = answer_positions(texts)
    with torch.inference_mode():
        hidden = target.model(ids.to(target.device), attention_mask=mask.to(target.device)).last_hidden_state
        tops = []
        for part in hidden[rows.to(hidden.device), places.to(hidden.device)].split(512):
            log_p = head(part, target.get_output_embeddings().weight, None).log_softmax(-1)
            tops.append(log_p.topk(min(TOP, log_p.shape[1]), dim=-1))
    log_p, top_ids = (torch.cat([top[half].cpu() for top in tops]) for half in (0, 1))
    lengths = [len(answer) for answer in answers]
    return [
        Text(text.prompt, text.sample, text.ids, text.start, of_ids.clone(), of_log_p.clone())
        for text, of_ids, of_log_p in zip(texts, top_ids.split(lengths), log_p.split(lengths), strict=True)
    ]
