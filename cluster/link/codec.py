"""The wire form of the messages of verifier and drafter: MessagePack, by msgspec.

A payload is a list of messages; each is an array of its type's tag and its fields. Arrays of NumPy travel as their
type, their shape and their bytes. `unpack` checks what only the link knows, the vocabulary and K; the messages check
the rest as they are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from outrider.cluster.link.messages import (
    TAUGHT_TOP,
    Commit,
    Message,
    MessageError,
    Open,
    PrefetchedProposal,
    Proposals,
    TrainingSample,
)
from outrider.cluster.modes import MAX_PATHS

PAYLOAD_TOKENS = 1 << 18
"""A payload is closed when its prompts have so many tokens: after a new link all requests are opened at once."""

_DTYPES = {np.dtype(kind).str: np.dtype(kind) for kind in (np.int32, np.float32, np.float16)}


def pack(messages: Sequence[Message]) -> list[bytes]:
    """Return payloads that hold the messages, in their order: one, or more where prompts are long.

    Raises MessageError for a value that no message may have.
    """
    payloads, start, tokens = [], 0, 0
    for index, message in enumerate(messages):
        if isinstance(message, Open):
            tokens += len(message.token_ids)
            if tokens >= PAYLOAD_TOKENS:
                payloads.append(_encode(messages[start : index + 1]))
                start, tokens = index + 1, 0
    if start < len(messages):
        payloads.append(_encode(messages[start:]))
    return payloads


def _encode(messages: Sequence[Message]) -> bytes:
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
    if not messages:
        raise MessageError("payload", "no messages")
    for message in messages:
        _check(message, vocab_size, max_tokens_k)
    return messages


def _check(message: Message, vocab_size: int, max_tokens_k: int) -> None:
    """Raise MessageError for a message that does not fit the target."""
    if isinstance(message, Commit):
        _check_count("Commit.token_ids", len(message.token_ids), max_tokens_k + 1)
        _check_count("Commit.num_wanted", message.num_wanted, max_tokens_k)
        _check_ids("Commit.token_ids", message.token_ids, vocab_size)
    elif isinstance(message, Proposals):
        _check_count("Proposals.token_ids", len(message.token_ids), max_tokens_k)
        _check_ids("Proposals.token_ids", message.token_ids, vocab_size)
        _check_count("Proposals.paths", len(message.paths), MAX_PATHS - 1)
        for path in message.paths:
            _check_count("Proposals.paths", len(path.token_ids), max_tokens_k)
            _check_ids("Proposals.paths", path.token_ids, vocab_size)
        if message.q is not None:
            _check_array("Proposals.q_ids", message.q.ids, vocab_size)
    elif isinstance(message, PrefetchedProposal):
        _check_count("PrefetchedProposal.token_ids", len(message.token_ids), max_tokens_k)
        _check_ids("PrefetchedProposal.token_ids", message.token_ids, vocab_size)
        _check_ids("PrefetchedProposal.next_token", (message.next_token,), vocab_size)
    elif isinstance(message, Open):
        _check_count("Open.num_speculative_tokens", message.num_speculative_tokens, max_tokens_k)
        _check_ids("Open.biases", [token for token, _ in message.sampling.biases], vocab_size)
        _check_ids("Open.token_ids", message.token_ids, vocab_size)
    elif isinstance(message, TrainingSample):
        _check_count("TrainingSample.ids", len(message.ids), max_tokens_k + 1)
        _check_count("TrainingSample.ids", message.ids.shape[1], TAUGHT_TOP)
        _check_array("TrainingSample.ids", message.ids, vocab_size)


def _check_count(field: str, count: int, most: int) -> None:
    if count > most:
        raise MessageError(field, f"{count}, at most {most} are allowed")


def _check_ids(field: str, ids: Sequence[int], vocab_size: int) -> None:
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        raise MessageError(field, f"ids from {min(ids)} to {max(ids)} are outside a vocabulary of {vocab_size}")


def _check_array(field: str, ids: np.ndarray, vocab_size: int) -> None:
    """Negative ids are refused by the messages themselves."""
    if ids.max() >= vocab_size:
        raise MessageError(field, f"id {ids.max()} is outside a vocabulary of {vocab_size}")


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
