"""Prompts to answer, from files: a line each in .txt, a JSON object each in .jsonl. Gzipped too. Pure but for reading.

A bad line is an error that names file and line: training on half of what was meant is noticed by nobody.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.cluster.config import ConfigError

MAX_LINE_BYTES = 1 << 20
"""Of one line; any prompt that fits into a context is far shorter."""

ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class Prompt:
    where: str
    """File and line, for errors."""

    messages: tuple[tuple[str, str], ...]
    """(role, content) of a chat; () for a text that is to be continued."""

    text: str = ""

    @property
    def digest(self) -> str:
        """The same for the same prompt, wherever it stands."""
        return hashlib.sha256(json.dumps([self.messages, self.text]).encode()).hexdigest()


@dataclass(frozen=True)
class PromptFile:
    path: Path
    sha256: str
    prompts: tuple[Prompt, ...]


def read_prompts(path: Path, option: str = "--data") -> PromptFile:
    """Raises ConfigError, naming file and line."""
    kind = "".join(path.suffixes[-2:]).removesuffix(".gz").rpartition(".")[2]
    if kind not in ("txt", "jsonl"):
        raise ConfigError(
            f"{option}: {path} is neither .txt (a prompt a line) nor .jsonl (a prompt or messages a line)"
        )
    digest = hashlib.sha256()
    read = _text_prompt if kind == "txt" else _json_prompt
    prompts = [read(line, where, option) for line, where in _lines(path, option, digest)]
    if not prompts:
        raise ConfigError(f"{option}: {path} is empty; give one prompt a line")
    return PromptFile(path, digest.hexdigest(), tuple(prompts))


def spread(prompts: Sequence[Prompt], count: int | None) -> list[Prompt]:
    """``count`` of them, evenly over the file; all where there are fewer, or count is None."""
    if count is None or count >= len(prompts):
        return list(prompts)
    return [prompts[position * len(prompts) // count] for position in range(count)]


def _lines(path: Path, option: str, digest: Any) -> Iterator[tuple[str, str]]:
    """(line, where), without line ends. Raises ConfigError."""
    opener: Any = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rb") as file:
            number = 0
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                where = f"{path}, line {number}"
                if len(line) > MAX_LINE_BYTES:
                    raise ConfigError(f"{option}: {where}: longer than {MAX_LINE_BYTES} bytes; cut or remove it")
                digest.update(line)
                yield _decoded(line, where, option), where
    except FileNotFoundError:
        raise ConfigError(f"{option}: {path}: no such file") from None
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{option}: {path} is not readable: {error}") from None


def _decoded(line: bytes, where: str, option: str) -> str:
    try:
        text = line.decode().rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{option}: {where}: not UTF-8 text ({error.reason}); remove it, or convert the file"
        ) from None
    if _is_binary(text):
        raise ConfigError(f"{option}: {where}: binary (it holds control characters); remove it")
    if not text.strip():
        raise ConfigError(f"{option}: {where}: empty; remove it")
    return text


def _is_binary(text: str, allowed: str = "\t") -> bool:
    return any(character < " " and character not in allowed for character in text)


def _text_prompt(line: str, where: str, option: str) -> Prompt:
    return Prompt(where, (), line)


def _json_prompt(line: str, where: str, option: str) -> Prompt:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{option}: {where}: not JSON ({error}); one object a line is expected") from None
    if not isinstance(row, dict) or ("prompt" in row) == ("messages" in row):
        raise ConfigError(f"{option}: {where}: one of the fields prompt and messages is expected")
    if "prompt" in row:
        if not isinstance(row["prompt"], str) or not row["prompt"].strip():
            raise ConfigError(f"{option}: {where}: prompt is no text, or empty")
        _check_text(row["prompt"], where, option)
        return Prompt(where, (), row["prompt"])
    messages = row["messages"]
    if not isinstance(messages, list) or not messages or not all(_is_message(message) for message in messages):
        raise ConfigError(
            f"{option}: {where}: messages is no list of objects with a role of {', '.join(ROLES)} and a text content"
        )
    for message in messages:
        _check_text(message["content"], where, option)
    return Prompt(where, tuple((message["role"], message["content"]) for message in messages))


def _check_text(text: str, where: str, option: str) -> None:
    """JSON can say what a text cannot hold. Raises ConfigError."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{option}: {where}: half a character (a lone surrogate); remove it") from None
    if _is_binary(text, allowed="\t\n\r"):
        raise ConfigError(f"{option}: {where}: binary (it holds control characters); remove it")


def _is_message(message: Any) -> bool:
    return (
        isinstance(message, dict)
        and message.get("role") in ROLES
        and isinstance(message.get("content"), str)
        and bool(message["content"].strip())
    )


def tokens_of(
    prompts: Sequence[Prompt], tokenizer: Any, room: int, chat: bool, fix: str, option: str
) -> list[list[int]]:
    """Token ids of every prompt.

    chat: a prompt without messages is one user's message. room: tokens that a prompt may have; fix: what the error
    about one that has more says. Raises ConfigError.
    """
    if not tokenizer.chat_template and (found := next((p for p in prompts if p.messages or chat), None)):
        raise ConfigError(
            f"{option}: {found.where}: a chat, and the target's tokenizer has no chat template; give plain prompts"
            + (", without --chat" if chat else "")
        )
    tokens = [_tokens_of(prompt, tokenizer, chat, option) for prompt in prompts]
    if none := next((p for p, ids in zip(prompts, tokens, strict=True) if not ids), None):
        raise ConfigError(f"{option}: {none.where}: no token at all; remove it")
    long = [(p, len(ids)) for p, ids in zip(prompts, tokens, strict=True) if len(ids) > room]
    if long:
        raise ConfigError(
            f"{option}: {long[0][0].where}: {long[0][1]} tokens, a prompt has room for {room}; {fix}"
            + (f" ({len(long)} prompts are too long)" if len(long) > 1 else "")
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
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"{option}: {prompt.where}: the chat template refuses it ({reason}); change it") from None
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
