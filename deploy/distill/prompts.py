"""Reads prompts from .jsonl, gzipped or not, with a ``prompt`` or ``messages`` in each line.

A bad line is an error that names file and line, since training on fewer prompts would go unnoticed.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.cluster.config import ConfigError


@dataclass(frozen=True)
class Prompt:
    """Holds one prompt."""

    where: str
    """File and line, for errors."""

    messages: tuple[tuple[str, str], ...]
    """(role, content) of a chat; empty for a text to continue."""

    text: str = ""

    @property
    def digest(self) -> str:
        """Digest of the prompt's content."""
        return hashlib.sha256(json.dumps([self.messages, self.text]).encode()).hexdigest()


@dataclass(frozen=True)
class PromptFile:
    """Holds the prompts of a file."""

    path: Path
    sha256: str
    """Digest of the unzipped content."""

    prompts: tuple[Prompt, ...]


def read_prompts(path: Path, option: str = "--data") -> PromptFile:
    """Returns the prompts of a file. Raises ConfigError naming file and line."""
    if ".jsonl" not in path.suffixes and path.exists():
        raise ConfigError(f"{option}: {path} is no .jsonl; give an object with prompt or messages a line")
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        lines = data.decode().split("\n")  # not splitlines: JSON strings may hold other line separators
    except FileNotFoundError:
        raise ConfigError(f"{option}: {path}: no such file") from None
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ConfigError(f"{option}: {path} is not readable: {error}") from None
    numbered = [(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise ConfigError(f"{option}: {path} is empty; give one prompt a line")
    return PromptFile(
        path, hashlib.sha256(data).hexdigest(), tuple(_prompt(line, where, option) for line, where in numbered)
    )


def _prompt(line: str, where: str, option: str) -> Prompt:
    try:
        row = json.loads(line)
        if "messages" in row:
            return Prompt(where, tuple((str(each["role"]), str(each["content"])) for each in row["messages"]))
        if row["prompt"].strip():
            return Prompt(where, (), row["prompt"])
    except ValueError as error:
        raise ConfigError(f"{option}: {where}: not JSON ({error}); one object a line is expected") from None
    except (KeyError, TypeError, AttributeError):
        pass
    raise ConfigError(f"{option}: {where}: neither prompt, a text, nor messages, each with role and content")


def spread(prompts: Sequence[Prompt], count: int | None) -> list[Prompt]:
    """Returns count prompts, evenly spread; all if there are fewer, or if count is None."""
    if count is None or count >= len(prompts):
        return list(prompts)
    return [prompts[position * len(prompts) // count] for position in range(count)]


def tokens_of(prompts: Sequence[Prompt], tokenizer: Any, room: int, chat: bool, option: str) -> list[list[int]]:
    """Returns the token ids of each prompt. Raises ConfigError for one that is too long.

    Args:
        chat: Treats a prompt without messages as a user's message.
        room: Greatest number of tokens in a prompt.
    """
    tokens = [_tokens_of(prompt, tokenizer, chat, option) for prompt in prompts]
    if wrong := next(((p, len(ids)) for p, ids in zip(prompts, tokens, strict=True) if not 0 < len(ids) <= room), None):
        raise ConfigError(
            f"{option}: {wrong[0].where}: {wrong[1]} tokens, and a prompt has 1 to {room}; remove it, or leave answers "
            "less room"
        )
    return tokens


def _tokens_of(prompt: Prompt, tokenizer: Any, chat: bool, option: str) -> list[int]:
    messages = prompt.messages or ((("user", prompt.text),) if chat else ())
    if not messages:
        return list(tokenizer(prompt.text)["input_ids"])
    said = [{"role": role, "content": content} for role, content in messages]
    try:
        text = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # noqa: BLE001 - a template is a program, which raises what it likes
        raise ConfigError(f"{option}: {prompt.where}: no chat template takes it ({error}); change it") from None
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
