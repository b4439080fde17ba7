"""Compares the token ids of target and draft model by digests, which each side computes where its checkpoint is."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

BLOCK = 64
"""Number of ids that share a digest."""

Marks = tuple[str, ...]
"""Digests of the tokens of each block of ids. Empty without a tokenizer."""


def read_vocabulary(model: str) -> dict[str, int] | None:
    """Returns token -> id from a local checkpoint's tokenizer.json, or None if it has no such vocabulary."""
    try:
        document = json.loads((Path(model) / "tokenizer.json").read_bytes())
        vocabulary = document["model"]["vocab"]
        if isinstance(vocabulary, list):  # unigram: [token, score] by id
            tokens = {entry[0]: index for index, entry in enumerate(vocabulary)}
        else:
            tokens = dict(vocabulary)
        tokens.update({added["content"]: added["id"] for added in document.get("added_tokens") or []})
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return tokens


def marks_of(model: str) -> Marks:
    """Returns the digests of a local checkpoint."""
    blocks: dict[int, list[tuple[int, str]]] = defaultdict(list)
    for token, index in (read_vocabulary(model) or {}).items():
        blocks[index // BLOCK].append((index, token))
    return tuple(
        hashlib.sha256(json.dumps(sorted(blocks[number])).encode()).hexdigest()[:16]
        for number in range(max(blocks, default=-1) + 1)
    )


def check_marks(target: Sequence[str], drafter: Sequence[str]) -> None:
    """Raises ValueError if the tokens of most blocks differ, which means another tokenizer.

    Tokenizers of one family differ in tokens that were added later, in a block or two, which costs acceptance only.
    """
    blocks = list(zip(target, drafter, strict=False))
    differing = sum(ours != theirs for ours, theirs in blocks)
    if 2 * differing > len(blocks):
        raise ValueError(
            f"drafter.model: its tokenizer is not the target's: {differing} of {len(blocks)} blocks of {BLOCK} ids "
            "mean other tokens; use a drafter of the same model family"
        )
