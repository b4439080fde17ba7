"""A vocabulary with a few thousand tokens, as real ones have: a single byte, or up to three letters."""

from __future__ import annotations

import itertools
import string


def vocabulary() -> list[bytes]:
    texts = [bytes([byte]) for byte in range(256)]
    for length in (2, 3):
        texts += ["".join(letters).encode() for letters in itertools.product(string.ascii_lowercase, repeat=length)]
    return [*texts, b"<eos>"]


EOS = len(vocabulary()) - 1


def serialised() -> str:
    """xgrammar's TokenizerInfo."""
    import xgrammar

    texts = vocabulary()
    return xgrammar.TokenizerInfo(texts, vocab_size=len(texts), stop_token_ids=[EOS]).serialize_json()
