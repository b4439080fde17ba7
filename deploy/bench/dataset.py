"""Prompts of a benchmark: JSONL, gzipped or not, with a field ``prompt``."""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from dataclasses import dataclass
from pathlib import Path

from cluster.config import ConfigError


@dataclass(frozen=True)
class Dataset:
    path: Path
    sha256: str
    """Of the file as it is, compressed or not."""

    prompts: tuple[str, ...]

    def spread(self, count: int | None) -> tuple[int, ...]:
        """Indices of ``count`` prompts, evenly spread over the file; of all when there are fewer, or count is None."""
        total = len(self.prompts)
        if count is None or count >= total:
            return tuple(range(total))
        return tuple(position * total // count for position in range(count))


def read_dataset(path: Path) -> Dataset:
    """Raises ConfigError: no such file, no JSON object in a line, no text in its field prompt, no line at all."""
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    except FileNotFoundError:
        raise ConfigError(f"--dataset: {path}: no such file; give a JSONL file with a field prompt") from None
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ConfigError(f"--dataset: {path} is not readable: {error}") from None
    # Not splitlines: JSON strings may hold line separators of Unicode's.
    lines = enumerate(text.split("\n"), start=1)
    prompts = tuple(_prompt(line, f"--dataset: {path}, line {number}") for number, line in lines if line.strip())
    if not prompts:
        raise ConfigError(f'--dataset: {path} is empty; one JSON object a line is expected, such as {{"prompt": "…"}}')
    return Dataset(path, hashlib.sha256(data).hexdigest(), prompts)


def _prompt(line: str, where: str) -> str:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON ({error}); one JSON object a line is expected") from None
    prompt = row.get("prompt") if isinstance(row, dict) else None
    if not isinstance(prompt, str) or not prompt:
        found = f"the fields are {', '.join(row)}" if isinstance(row, dict) and "prompt" not in row else "no text in it"
        raise ConfigError(f'{where}: no field prompt ({found}); each line needs one, such as {{"prompt": "…"}}')
    return prompt
