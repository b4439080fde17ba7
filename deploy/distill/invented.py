"""Prompts that a chat model makes up itself: it is given its own template up to where a user would speak, and speaks.

As in Magpie (Xu et al., arXiv 2406.08464). Such prompts are what the model has been taught to expect, cost no
collection of anybody's conversations, and carry nobody's licence but the model's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.actors.learning import draft_models
from outrider.actors.vllm_seam.offline_answers import TOGETHER, Engine, OfflineAnswers
from outrider.cluster.config import ConfigError
from outrider.cluster.whole_files import whole_file
from outrider.deploy.distill import models
from outrider.deploy.progress import Progress

_MARK = "OUTRIDERMARK"
_AT_ONCE = TOGETHER
_LEAST_TOKENS = 4
_LINES = str.maketrans("\n\t", "  ")
_TRIES = 8
"""As many candidates a prompt are made at most: a model that is no chat model ends hardly any of them."""


@dataclass(frozen=True)
class Settings:
    target: str
    out: Path
    count: int
    prompt_tokens: int
    """The longest; longer ones are dropped, not cut."""

    seed: int
    device: str
    dtype: str


def invent(settings: Settings, progress: Progress) -> Path:
    """Writes a line of JSON with ``messages`` each, no two alike. Raises ConfigError."""
    if settings.out.suffix != ".jsonl":
        raise ConfigError(f"--out: {settings.out} is no .jsonl")
    if settings.out.exists():
        raise ConfigError(f"--out: {settings.out} exists; choose another name, or remove it")
    target = models.locate(settings.target, "TARGET")
    document = models.check_architecture(target, "TARGET")
    tokenizer = models.load_tokenizer(target)
    before = tokenizer(_before_the_user(tokenizer, str(target)), add_special_tokens=False).input_ids
    ends = draft_models.ends_of(target)
    if not ends:
        raise ConfigError(f"TARGET: {target} names no token that ends a text; set eos_token_id in its config.json")
    engine = Engine(
        str(target),
        document,
        settings.dtype,
        settings.device,
        len(before) + settings.prompt_tokens,
        1,
        tuple(sorted(ends)),
    )
    found: dict[str, None] = {}
    made = 0
    progress.say("starting the engine that generates text")
    with OfflineAnswers(engine) as answers:
        while len(found) < settings.count:
            if made >= _TRIES * max(settings.count, _AT_ONCE):
                raise ConfigError(
                    f"TARGET: only {len(found)} of {made} texts that {target} made in a user's place ended within "
                    f"--prompt-tokens {settings.prompt_tokens}; raise that, or give prompts of your own"
                )
            batch = answers.of([before] * _AT_ONCE, settings.prompt_tokens, settings.seed + made)
            made += len(batch)
            found |= dict.fromkeys(_whole(tokenizer, ends, [answer.token_ids for answer in batch]))
            progress.wait("inventing:", f"{min(len(found), settings.count)} of {settings.count} prompts")
    with whole_file(settings.out) as work, work.open("w") as file:
        for prompt in list(found)[: settings.count]:
            file.write(json.dumps({"messages": [{"role": "user", "content": prompt}]}, ensure_ascii=False) + "\n")
    return settings.out


def _before_the_user(tokenizer: Any, target: str) -> str:
    """The chat template's text up to a user's first message. Raises ConfigError."""
    if tokenizer.chat_template is None:
        raise ConfigError(f"TARGET: {target} has no chat template, so nothing says where a user speaks")
    text = tokenizer.apply_chat_template([{"role": "user", "content": _MARK}], tokenize=False)
    before, mark, _ = str(text).partition(_MARK)
    if not mark or not before:
        raise ConfigError(f"TARGET: the chat template of {target} puts nothing before a user's message")
    return before


def _whole(tokenizer: Any, ends: set[int], texts: list[list[int]]) -> Iterator[str]:
    """Of the texts that end, those that are text: no control characters, no special tokens, no half characters."""
    for ids in texts:
        if ids[-1] not in ends or len(ids) <= _LEAST_TOKENS:
            continue
        text = str(tokenizer.decode(ids[:-1])).strip()
        special = any(token in text for token in tokenizer.all_special_tokens)
        printable = text.translate(_LINES).isprintable()
        if text and printable and "\ufffd" not in text and not special:
            yield text
