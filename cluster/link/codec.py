"""The wire form of verifier and drafter's messages: int32 words, never pickles.

A payload is ``[message count, message, message, ...]``; a message starts with its type, its length in words and its
request:

    Open       type length request | prompt_len offset K mode top_n top_k only_biased b adapter | seed tenant
               temperature top_p min_p | b biased ids | b biases | token ids
    Commit     type length request | base_committed_len num_wanted num_on_miss has_drafts | token ids
    Close      type length request | reason
    Name       type length request | n | n characters, four a word
    Proposals  type length request | base_committed_len status k n origin step_us | k token ids
               | [k*n q ids | k*n q probabilities]
    PrefetchedProposal      type length request | base_committed_len position next_token origin step_us | token ids
    TrainingSample     type length request | position n w | n*w ids | n*w log-probabilities, two a word

seed and tenant are int64, temperature, top_p and min_p are float64, two words each, low word first; biases and q
probabilities are float32 bits. Where an answer is not to be remembered, the tenant is sent as its complement, which is
negative. Of a prompt cut into pieces the one at offset 0 carries the biases, the others say
only_biased 0, b 0.
`unpack` checks what only the link knows, the vocabulary, K and the frame; the messages check the rest as they are made.
A PayloadWriter fills a frame, and goes on in the next one when it is full.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from outrider.cluster.link.frame import HEADER_WORDS
from outrider.cluster.link.messages import (
    MAX_BIASED_TOKENS,
    TAUGHT_TOP,
    Close,
    CloseReason,
    Commit,
    DraftOrigin,
    DraftSampling,
    Message,
    MessageError,
    Name,
    Open,
    PrefetchedProposal,
    Proposals,
    ProposalStatus,
    SparseQ,
    TrainingSample,
)
from outrider.cluster.modes import Mode

MIN_FRAME_WORDS = 4096
MAX_FRAME_WORDS = 16384
"""A device's wire moves a frame whole, be it a heartbeat: what is longer goes on in the next. For a longer message
frames are longer."""

_FRAME_ROUNDING_WORDS = 64
_MIN_OPEN_CHUNK_TOKENS = 64
"""An Open starts in the rest of a frame only if this many of its tokens, or all of them, fit there."""

_OPEN, _COMMIT, _CLOSE, _PROPOSALS, _NAME, _LESSON, _AHEAD = 1, 2, 3, 4, 5, 6, 7
_FIXED_WORDS = {_OPEN: 22, _COMMIT: 7, _CLOSE: 4, _PROPOSALS: 9, _NAME: 4, _LESSON: 6, _AHEAD: 8}
_OPEN_INTEGERS = 12
_SAMPLING = struct.Struct("<qqddd")
_SAMPLING_WORDS = struct.Struct("<10i")
_MODES = {int(mode): mode for mode in Mode}
_REASONS = {int(reason): reason for reason in CloseReason}
_ORIGINS = {int(origin): origin for origin in DraftOrigin}
_STATUSES = {int(status): status for status in ProposalStatus}


def frame_capacity_words(max_num_seqs: int, num_speculative_tokens: int, q_top_n: int = 0) -> int:
    """Words of a frame, header included: for a whole round of `max_num_seqs` requests in either direction, as far as
    MAX_FRAME_WORDS go, and for any one message."""
    k = num_speculative_tokens
    proposals = _proposals_words(k, q_top_n)
    commit_and_close = _FIXED_WORDS[_COMMIT] + k + 1 + _FIXED_WORDS[_CLOSE]
    longest = max(proposals, commit_and_close)
    words = max(min(max_num_seqs * longest + HEADER_WORDS + 1, MAX_FRAME_WORDS), longest + HEADER_WORDS + 1)
    return max(MIN_FRAME_WORDS, -(-words // _FRAME_ROUNDING_WORDS) * _FRAME_ROUNDING_WORDS)


def _proposals_words(k: int, n: int) -> int:
    return _FIXED_WORDS[_PROPOSALS] + k + 2 * k * n


def pack(messages: Sequence[Message], capacity_words: int) -> list[np.ndarray]:
    """Payloads, int32 [words], for as many frames of `capacity_words` (header included) as the messages need.

    Order is kept. An Open too long for its frame goes on in the next. Raises MessageError when another message does
    not fit a whole frame, or a number does not fit 32 bits.
    """
    writer = PayloadWriter(capacity_words - HEADER_WORDS)
    for message in messages:
        if isinstance(message, Commit):
            ids = message.token_ids
            head = [_COMMIT, _FIXED_WORDS[_COMMIT] + len(ids), message.request, message.base_committed_len]
            writer.add("Commit", [*head, message.num_wanted, message.num_on_miss, int(message.has_drafts), *ids])
        elif isinstance(message, Proposals):
            _write_proposals(message, writer)
        elif isinstance(message, PrefetchedProposal):
            _write_ahead(message, writer)
        elif isinstance(message, Close):
            writer.add("Close", [_CLOSE, 4, message.request, message.reason])
        elif isinstance(message, Name):
            _write_name(message, writer)
        elif isinstance(message, TrainingSample):
            _write_lesson(message, writer)
        else:
            _write_open(message, writer)
    return writer.finish()


def unpack(payload: np.ndarray, vocab_size: int, max_tokens_k: int, capacity_words: int | None = None) -> list[Message]:
    """The messages of one payload, int32 [words]. Nothing of the payload is kept; token ids come as lists.

    capacity_words: of the frames that answers go into; an Open that asks for a q too large for them is refused.
    Any words at all are safe to pass: whatever is not a valid payload raises MessageError naming the field.
    """
    total = len(payload)
    count = int(payload[0]) if total else 0
    if not 1 <= count <= (total - 1) // min(_FIXED_WORDS.values()):
        raise MessageError("payload.count", f"{count} messages in {total} words")
    messages: list[Message] = []
    position = 1
    for _ in range(count):
        head = payload[position : position + 9].tolist()
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
        elif kind == _AHEAD:
            messages.append(_read_ahead(head, words, vocab_size, max_tokens_k))
        elif kind == _CLOSE:
            messages.append(_read_close(head, words))
        elif kind == _NAME:
            messages.append(_read_name(head, words))
        elif kind == _LESSON:
            messages.append(_read_lesson(head, words, vocab_size, max_tokens_k))
        else:
            messages.append(_read_open(words, vocab_size, max_tokens_k, capacity_words))
        position += length
    if position != total:
        raise MessageError("payload.count", f"{total - position} words after the last of {count} messages")
    return messages


class PayloadWriter:
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


def _write_open(message: Open, writer: PayloadWriter) -> None:
    ids, sampling = message.token_ids, message.sampling
    tenant = sampling.tenant if sampling.remembered else ~sampling.tenant
    doubles = _SAMPLING.pack(sampling.seed, tenant, sampling.temperature, sampling.top_p, sampling.min_p)
    start = 0
    while start < len(ids):
        offset = message.offset + start
        biases = () if offset else sampling.biases
        fixed = _FIXED_WORDS[_OPEN] + 2 * len(biases)
        if writer.room - fixed < min(len(ids) - start, _MIN_OPEN_CHUNK_TOKENS):
            writer.next_frame()
        chunk = ids[start : start + max(writer.room - fixed, 1)]
        words = [_OPEN, fixed + len(chunk), message.request, message.prompt_len, offset, message.num_speculative_tokens]
        words += [sampling.mode, sampling.top_n, sampling.top_k, int(sampling.only_biased and not offset)]
        words += [len(biases), sampling.adapter]
        words += _SAMPLING_WORDS.unpack(doubles)
        words += [token for token, _ in biases]
        words += np.array([bias for _, bias in biases], np.float32).view(np.int32).tolist()
        writer.add("Open", words + list(chunk))
        start += len(chunk)


def _write_proposals(message: Proposals, writer: PayloadWriter) -> None:
    ids, q = message.token_ids, message.q
    n = 0 if q is None else q.ids.shape[1]
    head = [_PROPOSALS, _proposals_words(len(ids), n), message.request, message.base_committed_len]
    words = [*head, message.status, len(ids), n, message.origin, message.step_us, *ids]
    if q is None:
        writer.add("Proposals", words)
    else:
        probs = np.ascontiguousarray(q.probs).view(np.int32)
        writer.add("Proposals", words, (q.ids.reshape(-1), probs.reshape(-1)))


def _write_ahead(message: PrefetchedProposal, writer: PayloadWriter) -> None:
    ids = message.token_ids
    head = [_AHEAD, _FIXED_WORDS[_AHEAD] + len(ids), message.request, message.base_committed_len, message.position]
    writer.add("PrefetchedProposal", [*head, message.next_token, message.origin, message.step_us, *ids])


def _read_ahead(head: list[int], words: np.ndarray, vocab_size: int, max_tokens_k: int) -> PrefetchedProposal:
    _, length, request, base_committed_len, position, next_token, origin, step_us = head[:8]
    fixed = _FIXED_WORDS[_AHEAD]
    if origin not in _ORIGINS:
        raise MessageError("PrefetchedProposal.origin", f"unknown origin {origin}")
    if length - fixed > max_tokens_k:
        raise MessageError(
            "PrefetchedProposal.token_ids", f"{length - fixed} tokens, at most {max_tokens_k} are allowed"
        )
    if next_token >= vocab_size:
        raise MessageError("PrefetchedProposal.next_token", f"{next_token} is outside a vocabulary of {vocab_size}")
    token_ids = _token_ids("PrefetchedProposal.token_ids", words[fixed:], vocab_size)
    return PrefetchedProposal(request, base_committed_len, position, next_token, token_ids, _ORIGINS[origin], step_us)


def _write_name(message: Name, writer: PayloadWriter) -> None:
    encoded = message.request_id.encode("ascii")
    padded = np.frombuffer(encoded + b"\0" * (-len(encoded) % 4), dtype=np.int32).tolist()
    writer.add("Name", [_NAME, _FIXED_WORDS[_NAME] + len(padded), message.request, len(encoded), *padded])


def _read_name(head: list[int], words: np.ndarray) -> Name:
    count, fixed = head[3], _FIXED_WORDS[_NAME]
    if count < 1 or len(words) != fixed + -(-count // 4):
        raise MessageError("Name.request_id", f"{count} characters in {len(words) - fixed} words")
    encoded = words[fixed:].tobytes()
    if any(encoded[count:]):
        raise MessageError("Name.request_id", "more characters than announced")
    return Name(head[2], encoded[:count].decode("latin-1"))


def _write_lesson(message: TrainingSample, writer: PayloadWriter) -> None:
    rows, width = message.ids.shape
    log_p = np.zeros(-(-rows * width // 2) * 2, np.float16)
    log_p[: rows * width] = message.log_p.reshape(-1)
    packed = log_p.view(np.int32)
    head = [_LESSON, _FIXED_WORDS[_LESSON] + rows * width + len(packed), message.request, message.position, rows, width]
    writer.add("TrainingSample", head, (message.ids.reshape(-1), packed))


def _read_lesson(head: list[int], words: np.ndarray, vocab_size: int, max_tokens_k: int) -> TrainingSample:
    _, length, request, position, rows, width = head[:6]
    if not (1 <= rows <= max_tokens_k + 1 and 1 <= width <= TAUGHT_TOP):
        raise MessageError("TrainingSample.ids", f"{rows} rows of {width} for {max_tokens_k} drafts and one")
    fixed, count = _FIXED_WORDS[_LESSON], rows * width
    if length != fixed + count + -(-count // 2):
        raise MessageError("TrainingSample.ids", f"{rows} rows of {width} do not make {length} words")
    ids = words[fixed : fixed + count].reshape(rows, width).copy()
    if ids.max() >= vocab_size:
        raise MessageError("TrainingSample.ids", f"id {ids.max()} is outside a vocabulary of {vocab_size}")
    log_p = words[fixed + count :].copy().view(np.float16)[:count].reshape(rows, width)
    return TrainingSample(request, position, ids, log_p)


def _read_open(words: np.ndarray, vocab_size: int, max_tokens_k: int, capacity_words: int | None) -> Open:
    integers = words[:_OPEN_INTEGERS].tolist()
    _, length, request, prompt_len, offset, k, mode, top_n, top_k, only_biased, b, adapter = integers
    if k > max_tokens_k:
        raise MessageError("Open.num_speculative_tokens", f"{k} is over {max_tokens_k}")
    if mode not in _MODES:
        raise MessageError("Open.mode", f"unknown mode {mode}")
    if only_biased not in (0, 1) or (only_biased and offset):
        raise MessageError("Open.only_biased", f"{only_biased} at offset {offset}")
    biases_at = _FIXED_WORDS[_OPEN]
    if not 0 <= b <= MAX_BIASED_TOKENS or (b and offset) or biases_at + 2 * b > length:
        raise MessageError("Open.biases", f"{b} of them at offset {offset} in {length} words")
    tokens_at = biases_at + 2 * b
    biased = _token_ids("Open.biases", words[biases_at : biases_at + b], vocab_size)
    biases = words[biases_at + b : tokens_at].view(np.float32).tolist()
    seed, tenant, temperature, top_p, min_p = _SAMPLING.unpack_from(words, 4 * _OPEN_INTEGERS)
    sampling = DraftSampling(
        mode=_MODES[mode],
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        top_n=top_n,
        biases=tuple(zip(biased, biases, strict=True)),
        only_biased=bool(only_biased),
        tenant=tenant if tenant >= 0 else ~tenant,
        remembered=tenant >= 0,
        adapter=adapter,
    )
    if capacity_words is not None and sampling.mode.samples_q:
        answer, room = _proposals_words(k, min(top_n, vocab_size)), capacity_words - HEADER_WORDS - 1
        if answer > room:
            raise MessageError("Open.top_n", f"answers of {answer} words do not fit frames with room for {room}")
    token_ids = _token_ids("Open.token_ids", words[tokens_at:], vocab_size)
    return Open(request, prompt_len, offset, token_ids, k, sampling)


def _read_commit(head: list[int], words: np.ndarray, vocab_size: int, max_tokens_k: int) -> Commit:
    fixed = _FIXED_WORDS[_COMMIT]
    if len(words) - fixed > max_tokens_k + 1:
        raise MessageError("Commit.token_ids", f"{len(words) - fixed} tokens are over {max_tokens_k} drafts and one")
    if head[4] > max_tokens_k:
        raise MessageError("Commit.num_wanted", f"{head[4]} is over {max_tokens_k}")
    if head[6] not in (0, 1):
        raise MessageError("Commit.has_drafts", f"{head[6]} is neither 0 nor 1")
    token_ids = _token_ids("Commit.token_ids", words[fixed:], vocab_size)
    return Commit(head[2], head[3], token_ids, head[4], head[5], bool(head[6]))


def _read_close(head: list[int], words: np.ndarray) -> Close:
    if len(words) != 4:
        raise MessageError("message.length", f"{len(words)} words for a Close")
    if head[3] not in _REASONS:
        raise MessageError("Close.reason", f"unknown reason {head[3]}")
    return Close(head[2], _REASONS[head[3]])


def _read_proposals(head: list[int], words: np.ndarray, vocab_size: int, max_tokens_k: int) -> Proposals:
    _, length, request, base_committed_len, status, k, n, origin, step_us = head
    if origin not in _ORIGINS:
        raise MessageError("Proposals.origin", f"unknown origin {origin}")
    if status not in _STATUSES:
        raise MessageError("Proposals.status", f"unknown status {status}")
    if not 0 <= k <= max_tokens_k:
        raise MessageError("Proposals.token_ids", f"{k} tokens, at most {max_tokens_k} are allowed")
    if n < 0 or (n and not k) or length != _proposals_words(k, n):
        raise MessageError("Proposals.q_ids", f"{k} drafts with top {n} do not make {length} words")
    q, at = None, _FIXED_WORDS[_PROPOSALS]
    if n:
        ids = words[at + k : at + k + k * n].reshape(k, n).copy()
        if ids.max() >= vocab_size:
            raise MessageError("Proposals.q_ids", f"id {ids.max()} is outside a vocabulary of {vocab_size}")
        q = SparseQ(ids, words[at + k + k * n :].reshape(k, n).copy().view(np.float32))
    token_ids = _token_ids("Proposals.token_ids", words[at : at + k], vocab_size)
    return Proposals(request, base_committed_len, token_ids, _STATUSES[status], q, _ORIGINS[origin], step_us)


def _token_ids(field: str, words: np.ndarray, vocab_size: int) -> list[int]:
    ids: list[int] = words.tolist()
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        raise MessageError(field, f"ids from {min(ids)} to {max(ids)} are outside a vocabulary of {vocab_size}")
    return ids
