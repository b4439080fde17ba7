"""The wire form of the messages of verifier and drafter: MessagePack, by msgspec.

A payload is a list of messages; each is an array of its type's tag and its fields. Arrays of NumPy travel as their
type, their shape and their bytes. `unpack` checks what only the link knows, the vocabulary and K; msgspec and the
messages check the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from outrider.cluster.link.messages import (
    Commit,
    Message,
    MessageError,
    Open,
    PrefetchedProposal,
    Proposals,
    TrainingSample,
)

_DTYPES = {np.dtype(kind).str: np.dtype(kind) for kind in (np.int32, np.float32, np.float16)}


def pack(messages: Sequence[Message]) -> bytes:
    """Return a payload that holds the messages, in their order. Raises MessageError for a value that cannot be sent."""
    try:
        return _ENCODER.encode(list(messages))
    except (OverflowError, TypeError, ValueError) as error:
        raise MessageError("payload", f"a value cannot be sent: {error}") from None


def unpack(payload: bytes, vocab_size: int, max_tokens_k: int) -> list[Message]:
    """Return the messages of one payload.

    Any bytes at all are safe to pass: whatever is not a valid payload raises MessageError naming the field.
    """
    try:
        messages = _DECODER.decode(payload)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        if isinstance(error.__cause__, MessageError):
            raise error.__cause__ from None
        raise MessageError("payload", str(error)) from None
    for message in messages:
        drafts, token = _extent(message)
        if drafts > max_tokens_k:
            raise MessageError(type(message).__name__, f"{drafts} drafts, at most {max_tokens_k} are allowed")
        if token >= vocab_size:
            raise MessageError(type(message).__name__, f"id {token} is outside a vocabulary of {vocab_size}")
    return messages


def _extent(message: Message) -> tuple[int, int]:
    """Return the greatest number of drafts and the greatest token id that a message speaks of."""
    if isinstance(message, Commit):
        return max(len(message.token_ids) - 1, message.num_wanted), max(message.token_ids)
    if isinstance(message, Proposals):
        chains = [message.token_ids, *(path.token_ids for path in message.paths)]
        ids = [max(chain, default=0) for chain in chains]
        if message.q is not None:
            ids.append(int(message.q.ids.max()))
        return max(map(len, chains)), max(ids)
    if isinstance(message, PrefetchedProposal):
        return len(message.token_ids), max(message.next_token, *message.token_ids)
    if isinstance(message, Open):
        biased = max((token for token, _ in message.sampling.biases), default=0)
        return message.num_speculative_tokens, max(biased, max(message.token_ids))
    if isinstance(message, TrainingSample):
        return len(message.ids) - 1, int(message.ids.max())
    return 0, 0


def _to_wire(value: Any) -> Any:
    """Encode what msgspec does not know: arrays, and NumPy's integers."""
    if isinstance(value, np.ndarray):
        return value.tolist() if value.ndim == 1 else (value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, np.integer):
        return int(value)
    raise TypeError(f"{type(value).__name__} is not sent")


def _from_wire(kind: type, value: Any) -> Any:
    """Decode an array; it owns its memory. Raises MessageError."""
    assert kind is np.ndarray
    try:
        name, (rows, columns), data = value
        dtype = _DTYPES[name]
        if min(rows, columns) < 0 or rows * columns * dtype.itemsize != len(data):
            raise ValueError(f"{len(data)} bytes for {rows} rows of {columns}")
        return np.frombuffer(data, dtype).reshape(rows, columns).copy()
    except (KeyError, TypeError, ValueError) as error:
        raise MessageError("payload", f"no array: {error}") from None


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_to_wire)
_DECODER = msgspec.msgpack.Decoder(list[Message], dec_hook=_from_wire)
