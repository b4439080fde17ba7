"""What a checkpoint's token ids mean, and whether a target and a draft model mean the same by them: told where each is
loaded, for the node that an application is built on may have neither.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

BLOCK = 64
"""Ids that have one digest."""

Marks = tuple[str, ...]
"""Digests of what ids mean, by block. (): there is no tokenizer to read."""


def read_vocabulary(model: str) -> dict[str, int] | None:
    """Token -> id from a local checkpoint's tokenizer.json; None where there is none or it keeps none of these."""
    try:
        document = json.loads((Path(model) / "tokenizer.json").read_text())
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
    """Of a local checkpoint."""
    blocks: dict[int, list[tuple[int, str]]] = defaultdict(list)
    for token, index in (read_vocabulary(model) or {}).items():
        blocks[index // BLOCK].append((index, token))
    return tuple(
        hashlib.sha256(json.dumps(sorted(blocks[number])).encode()).hexdigest()[:16]
        for number in range(max(blocks, default=-1) + 1)
    )


def check_marks(target: Sequence[str], drafter: Sequence[str]) -> None:
    """Raise ValueError where most ids mean other tokens: another tokenizer. Those of one family differ in what was
    added later, in a block or two, which costs acceptance only."""
    blocks = list(zip(target, drafter, strict=False))
    differing = sum(ours != theirs for ours, theirs in blocks)
    if 2 * differing > len(blocks):
        raise ValueError(
            f"drafter.model: its tokenizer is not the target's: {differing} of {len(blocks)} blocks of {BLOCK} ids "
            "mean other tokens; use a drafter of the same model family"
        )
