"""Compares the token ids of target and draft model by digests, which each side computes where its checkpoint is."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider.cluster.config_section import ConfigError

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


MASK_TOKENS = "mask_token_id", "pard_token", "ptd_token_id"
"""Names of a draft model's mask token in config.json, in vLLM's order."""


def mask_token(document: Mapping[str, Any], parallel_drafting: bool | None = None) -> int | None:
    """Returns the mask token of a draft model that drafts in one pass; None: it drafts token by token.

    Args:
        document: the checkpoint's config.json.
        parallel_drafting: as drafter.parallel_drafting.

    Raises:
        ConfigError: it is to draft in one pass and has none.
    """
    found = next((int(document[name]) for name in MASK_TOKENS if document.get(name) is not None), None)
    if parallel_drafting and found is None:
        raise ConfigError(
            "drafter.parallel_drafting: the config.json of drafter.model names no mask token "
            f"({', '.join(MASK_TOKENS)}); leave it out"
        )
    return None if parallel_drafting is False else found


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
