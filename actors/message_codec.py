"""The wire form of verifier and drafter's messages: int32 words, never pickles.

A payload is ``[message count, message, message, ...]``; a message starts with its type, its length in words and its
request:

    Open       type length request | prompt_len offset K top_k has_seed | seed temperature top_p | token ids
    Commit     type length request | base_committed_len | token ids
    Close      type length request | reason
    Proposals  type length request | base_committed_len status k n | k token ids | [k*n q ids | k*n q probabilities]

seed is an int64, temperature and top_p are float64, two words each, low word first; q probabilities are float32 bits.
`unpack` checks what only the link knows, the vocabulary and K; the messages check the rest as they are made.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from actors.messages import (
    Close,
    CloseReason,
    Commit,
    Message,
    MessageError,
    Open,
    Proposals,
    ProposalStatus,
    SparseQ,
)
from cluster.link.frame import HEADER_WORDS

MIN_FRAME_WORDS = 4096
_FRAME_ROUNDING_WORDS = 64
_MIN_OPEN_CHUNK_TOKENS = 64
"""An Open starts in the rest of a frame only if this many of its tokens, or all of them, fit there."""

_OPEN, _COMMIT, _CLOSE, _PROPOSALS = 1, 2, 3, 4
_FIXED_WORDS = {_OPEN: 14, _COMMIT: 4, _CLOSE: 4, _PROPOSALS: 7}
_SAMPLING = struct.Struct("<qdd")
_SAMPLING_WORDS = struct.Struct("<6i")
_SAMPLING_AT_BYTE = 32
_REASONS = {int(reason): reason for reason in CloseReason}
_STATUSES = {int(status): status for status in ProposalStatus}


def frame_capacity_words(max_num_seqs: int, num_speculative_tokens: int, q_top_n: int = 0) -> int:
    """Words of a frame, header included, that holds a whole round for `max_num_seqs` requests in either direction."""
    k = num_speculative_tokens
    proposals = _FIXED_WORDS[_PROPOSALS] + k + 2 * k * q_top_n
    commit_and_close = _FIXED_WORDS[_COMMIT] + k + 1 + _FIXED_WORDS[_CLOSE]
    words = HEADER_WORDS + 1 + max_num_seqs * max(proposals, commit_and_close)
    return max(MIN_FRAME_WORDS, -(-words // _FRAME_ROUNDING_WORDS) * _FRAME_ROUNDING_WORDS)


def pack(messages: Sequence[Message], capacity_words: int) -> list[np.ndarray]:
    """Payloads, int32 [words], for as many frames of `capacity_words` (header included) as the messages need.

    Order is kept. An Open too long for its frame goes on in the next. Raises MessageError when another message does
    not fit a whole frame, or a number does not fit 32 bits.
    """
    writer = _PayloadWriter(capacity_words - HEADER_WORDS)
    for message in messages:
        if isinstance(message, Commit):
            ids = message.token_ids
            writer.add("Commit", [_COMMIT, 4 + len(ids), message.request, message.base_committed_len, *ids])
        elif isinstance(message, Proposals):
            _write_proposals(message, writer)
        elif isinstance(message, Close):
            writer.add("Close", [_CLOSE, 4, message.request, message.reason])
        else:
            _write_open(message, writer)
    return writer.finish()


def unpack(payload: np.ndarray, vocab_size: int, max_tokens_k: int) -> list[Message]:
    """The messages of one payload, int32 [words]. Nothing of the payload is kept; token ids come as lists.

    Any words at all are safe to pass: whatever is not a valid payload raises MessageError naming the field.
    """
    total = len(payload)
    count = int(payload[0]) if total else 0
    if not 1 <= count <= (total - 1) // min(_FIXED_WORDS.values()):
        raise MessageError("payload.count", f"{count} messages in {total} words")
    messages: list[Message] = []
    position = 1
    for _ in range(count):
        head = payload[position : position + 7].tolist()
        if len(head) < 4:
            raise MessageError("payload.count", f"{count} messages announced, {len(messages)} found")
        kind, length = head[0], head[1]
        if kind not in _FIXED_WORDS:
            raise MessageError("message.type", f"unknown type {kind}")
        if not _FIXED_WORDS[kind] <= length <= total - position:
            raise MessageError("message.length", f"{length} words for type {kind}, {total - position} left")
        words = payload[position : position + length]
        if kind == _COMMIT:
            messages.append(_read_commit(head, words, vocab_size, max_tokens_k))
        elif kind == _PROPOSALS:
            messages.append(_read_proposals(head, words, vocab_size, max_tokens_k))
        elif kind == _CLOSE:
            messages.append(_read_close(head, words))
        else:
            messages.append(_read_open(head, words, vocab_size, max_tokens_k))
        position += length
    if position != total:
        raise MessageError("payload.count", f"{total - position} words after the last of {count} messages")
    return messages


class _PayloadWriter:
    """Fills payloads of `capacity` words one after the other. Small things go through a list, q through arrays."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._done: list[np.ndarray] = []
        self._start()

    def _start(self) -> None:
        self._arrays: list[np.ndarray] = []
        self._words: list[int] = [0]
        self._count = 0
        self.room = self._capacity - 1

    def add(self, what: str, words: list[int], arrays: Sequence[np.ndarray] = ()) -> None:
        """One message: `words`, then the flat int32 `arrays`. On to the next frame when this one lacks the room."""
        size = len(words) + sum(len(array) for array in arrays)
        if size > self.room:
            self.next_frame()
            if size > self.room:
                raise MessageError(what, f"{size} words do not fit a frame with room for {self.room}")
        self._words += words
        if arrays:
            self._flush_words()
            self._arrays += arrays
        self._count += 1
        self.room -= size

    def next_frame(self) -> None:
        if self._count:
            self._flush_words()
            payload = self._arrays[0] if len(self._arrays) == 1 else np.concatenate(self._arrays)
            payload[0] = self._count
            self._done.append(payload)
            self._start()

    def finish(self) -> list[np.ndarray]:
        self.next_frame()
        return self._done

    def _flush_words(self) -> None:
        try:
            self._arrays.append(np.array(self._words, dtype=np.int32))
        except (OverflowError, ValueError, TypeError) as error:
            raise MessageError("payload", f"a value is no 32-bit integer: {error}") from None
        self._words = []


def _write_open(message: Open, writer: _PayloadWriter) -> None:
    ids = message.token_ids
    sampling = _SAMPLING_WORDS.unpack(_SAMPLING.pack(message.seed or 0, message.temperature, message.top_p))
    fixed = _FIXED_WORDS[_OPEN]
    start = 0
    while start < len(ids):
        if writer.room - fixed < min(len(ids) - start, _MIN_OPEN_CHUNK_TOKENS):
            writer.next_frame()
        chunk = ids[start : start + max(writer.room - fixed, 1)]
        head = [_OPEN, fixed + len(chunk), message.request, message.prompt_len, message.offset + start]
        head += [message.num_speculative_tokens, message.top_k, int(message.seed is not None), *sampling]
        writer.add("Open", head + list(chunk))
        start += len(chunk)


def _write_proposals(message: Proposals, writer: _PayloadWriter) -> None:
    ids, q = message.token_ids, message.q
    n = 0 if q is None else q.ids.shape[1]
    length = _FIXED_WORDS[_PROPOSALS] + len(ids) + 2 * len(ids) * n
    words = [_PROPOSALS, length, message.request, message.base_committed_len, message.status, len(ids), n, *ids]
    if q is None:
        writer.add("Proposals", words)
    else:
        probs = np.ascontiguousarray(q.probs).view(np.int32)
        writer.add("Proposals", words, (q.ids.reshape(-1), probs.reshape(-1)))


def _read_open(head: list[int], words: np.ndarray, vocab_size: int, max_tokens_k: int) -> Open:
    _, _, request, prompt_len, offset, num_speculative_tokens, top_k = head
    has_seed = int(words[7])
    if has_seed not in (0, 1):
        raise MessageError("Open.seed", f"has_seed is {has_seed}, neither 0 nor 1")
    if num_speculative_tokens > max_tokens_k:
        raise MessageError("Open.num_speculative_tokens", f"{num_speculative_tokens} is over {max_tokens_k}")
    seed, temperature, top_p = _SAMPLING.unpack_from(words, _SAMPLING_AT_BYTE)
    return Open(
        request=request,
        prompt_len=prompt_len,
        offset=offset,
        token_ids=_token_ids("Open.token_ids", words[_FIXED_WORDS[_OPEN] :], vocab_size),
        num_speculative_tokens=num_speculative_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed if has_seed else None,
    )


def _read_commit(head: list[int], words: np.ndarray, vocab_size: int, max_tokens_k: int) -> Commit:
    if len(words) - 4 > max_tokens_k + 1:
        raise MessageError("Commit.token_ids", f"{len(words) - 4} tokens are over {max_tokens_k} drafts and one")
    return Commit(head[2], head[3], _token_ids("Commit.token_ids", words[4:], vocab_size))


def _read_close(head: list[int], words: np.ndarray) -> Close:
    if len(words) != 4:
        raise MessageError("message.length", f"{len(words)} words for a Close")
    if head[3] not in _REASONS:
        raise MessageError("Close.reason", f"unknown reason {head[3]}")
    return Close(head[2], _REASONS[head[3]])


def _read_proposals(head: list[int], words: np.ndarray, vocab_size: int, max_tokens_k: int) -> Proposals:
    _, length, request, base_committed_len, status, k, n = head
    if status not in _STATUSES:
        raise MessageError("Proposals.status", f"unknown status {status}")
    if not 0 <= k <= max_tokens_k:
        raise MessageError("Proposals.token_ids", f"{k} tokens, at most {max_tokens_k} are allowed")
    if n < 0 or (n and not k) or length != 7 + k + 2 * k * n:
        raise MessageError("Proposals.q_ids", f"{k} drafts with top {n} do not make {length} words")
    q = None
    if n:
        ids = words[7 + k : 7 + k + k * n].reshape(k, n).copy()
        if ids.max() >= vocab_size:
            raise MessageError("Proposals.q_ids", f"id {ids.max()} is outside a vocabulary of {vocab_size}")
        q = SparseQ(ids, words[7 + k + k * n :].reshape(k, n).copy().view(np.float32))
    token_ids = _token_ids("Proposals.token_ids", words[7 : 7 + k], vocab_size)
    return Proposals(request, base_committed_len, token_ids, _STATUSES[status], q)


def _token_ids(field: str, words: np.ndarray, vocab_size: int) -> list[int]:
    ids: list[int] = words.tolist()
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        raise MessageError(field, f"ids from {min(ids)} to {max(ids)} are outside a vocabulary of {vocab_size}")
    return ids
