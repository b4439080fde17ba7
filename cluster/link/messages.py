"""The messages between verifier and drafter, and their wire form: MessagePack, by msgspec.

A payload is a list of messages; each is an array of its type's tag and its fields. Arrays of NumPy travel as their
type, their shape and their bytes. msgspec checks a field's type and range where a message is received. What fields have
to be together is checked in ``__post_init__``, also where a message is made. `unpack` checks what only the link knows,
the vocabulary and K.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta

from outrider.cluster.modes import MAX_PATHS, Mode

PROTOCOL_VERSION = 11
"""Part of what both ends of a link must agree on (drafter_registry.fingerprint)."""

MAX_INT31 = 2**31 - 1

Q_SUM_TOLERANCE = 1e-3
"""How far the probabilities of a row of q, float32, may sum to something else than 1."""

TAUGHT_SUM_TOLERANCE = 0.02
"""How far the probabilities of a TrainingSample's row may exceed one, since they travel as 16-bit logarithms."""

_LOG_P_TOLERANCE = 1e-3

MAX_TOP_N = 1024

TAUGHT_TOP = 16
"""Number of the target's likeliest tokens that a drafter that learns is sent."""

MAX_NAME_LENGTH = 160
MAX_BIASED_TOKENS = 512
"""Longest list of a request's biases. A longer one is not sent, which costs acceptance only."""

MAX_ADAPTERS = 256
"""Most LoRA adapters of a drafter."""

MAX_BIAS = float(np.finfo(np.float32).max)

Int31 = Annotated[int, Meta(ge=0, le=MAX_INT31)]
TokenIds = Annotated[Sequence[Int31], Meta(min_length=1)]


class DraftOrigin(enum.IntEnum):
    """Tells where the drafts of an answer come from."""

    NONE = 0
    """No answer in time, or one without drafts for another reason than its length."""

    MAIN_LINE = 1
    """Drafted ahead: every draft was accepted and the bonus token was the one guessed. Or looked up, without a step."""

    SIDE_BRANCH = 2
    """Drafted ahead for another outcome than that of the main line."""

    MISS = 3
    """The outcome was not foreseen: drafted while the target waited, or not at all."""

    @property
    def is_hit(self) -> bool:
        return self in (DraftOrigin.MAIN_LINE, DraftOrigin.SIDE_BRANCH)


class MessageError(ValueError):
    """Refuses a message that must not be sent or believed. `field` names what is wrong, e.g. ``Commit.token_ids``."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(field, problem)
        self.field, self.problem = field, problem

    def __str__(self) -> str:
        return f"{self.field}: {self.problem}"


class CloseReason(enum.IntEnum):
    FINISHED = 1
    ABORTED = 2
    PREEMPTED = 3


class ProposalStatus(enum.IntEnum):
    OK = 1
    NOT_READY = 2
    """Still prefilling."""

    OUT_OF_KV = 3
    LENGTH = 4
    """The drafter's max_model_len is reached."""

    UNKNOWN_REQUEST = 5
    """The drafter does not know the request: send a fresh Open."""

    READY = 6
    """Prefilled: from now on commits of this request are answered with drafts."""


@dataclass(frozen=True, slots=True)
class DraftSampling:
    """Tells how a request's tokens are chosen and its drafts are to be drawn.

    Only mode, seed and top_n bear on exactness; the rest helps acceptance.

    mode: how the drafts will be verified. temperature: above 0, ignored in GREEDY. top_k: 0 for none.
    seed: the request's, the same as the verifier uses: a client's or a random one, never shared by requests.
    top_n: rejection and block: tokens in a row of q, 0 for greedy drafts, which have a one-hot q that need not travel.
    biases: (token id, added to its logit) pairs, no id twice; float32 on the wire; minus infinity forbids a token.
    only_biased: every token not listed is forbidden.
    tenant: whose memory of answers the drafter may use and add to, 63 bits; 0: everybody's.
    adapter: number of the drafter's own LoRA adapter, counted from 1 as they are configured; 0: none.
    """

    mode: Mode = Mode.GREEDY
    temperature: float = 0.0
    top_k: Int31 = 0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] = 0
    top_n: Annotated[int, Meta(ge=0, le=MAX_TOP_N)] = 64
    biases: tuple[tuple[int, float], ...] = ()
    only_biased: bool = False
    tenant: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    adapter: Annotated[int, Meta(ge=0, le=MAX_ADAPTERS)] = 0

    @property
    def has_q(self) -> bool:
        """Whether drafts are drawn from a q that travels with them."""
        return self.mode.samples_q and self.top_n > 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise MessageError("Open.temperature", f"{self.temperature} is not a finite number from 0 up")
        if self.mode is not Mode.GREEDY and self.temperature == 0:
            raise MessageError("Open.temperature", f"0 with mode {self.mode.name}")
        if len(self.biases) > MAX_BIASED_TOKENS:
            raise MessageError("Open.biases", f"{len(self.biases)} tokens, at most {MAX_BIASED_TOKENS} are allowed")
        if len({token for token, _ in self.biases}) < len(self.biases):
            raise MessageError("Open.biases", "a token stands twice")
        if any(not 0 <= token <= MAX_INT31 for token, _ in self.biases):
            raise MessageError("Open.biases", "an id is negative or has more than 31 bits")
        # Written so that NaN fails.
        if not all(-MAX_BIAS <= bias <= MAX_BIAS or bias == -math.inf for _, bias in self.biases):
            raise MessageError("Open.biases", "a bias is neither a finite float32 nor minus infinity")
        if self.only_biased and not any(bias > -math.inf for _, bias in self.biases):
            raise MessageError("Open.only_biased", "set, but no token is left")


class _Message(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Holds how messages and their parts travel: as an array of the fields, behind a message's tag."""


class Open(_Message, tag=1):
    """Asks the drafter to follow a request.

    request: a handle of this link, 0 to 2**31-1, never used twice in the link's life. A request that comes back
        after preemption gets a new one, and its token_ids then contain the output committed so far.
    token_ids: the whole text.
    name: the id by which the engine knows the request, printable ASCII, for the drafter's log; "": not sent.
    """

    request: Int31
    token_ids: TokenIds
    num_speculative_tokens: Int31
    sampling: DraftSampling
    name: Annotated[str, Meta(max_length=MAX_NAME_LENGTH, pattern=r"^[ -~]*\Z")] = ""


class Commit(_Message, tag=2):
    """Reports the outcome of a round for one request: the accepted drafts and the next token.

    base_committed_len: tokens committed before these, prompt included. The ids travel, so the drafter need not
    remember what was verified.
    num_wanted: drafts wanted for the next round; 0: none, and no answer. num_on_miss: drafts to compute
    if no branch drafted ahead matches; 0: such a commit is answered at once, without drafts.
    has_drafts: the verifier has as many already, from a PrefetchedProposal for this outcome, and awaits no answer.
    num_paths: paths wanted for the next round, the main line included; 1: a chain. After a proposal with further paths
    the drafter drafts nothing ahead.
    """

    request: Int31
    base_committed_len: Int31
    token_ids: TokenIds
    num_wanted: Int31
    num_on_miss: Int31
    has_drafts: bool = False
    num_paths: Annotated[int, Meta(ge=1, le=MAX_PATHS)] = 1

    def __post_init__(self) -> None:
        if not 0 <= self.num_on_miss <= self.num_wanted:
            raise MessageError("Commit.num_on_miss", f"{self.num_on_miss} is not in 0 to {self.num_wanted} wanted")
        if self.has_drafts and not self.num_wanted:
            raise MessageError("Commit.has_drafts", "set, but none are wanted")

    @property
    def committed_len(self) -> int:
        """Returns the number of tokens committed now, which Proposals that answer this are based on."""
        return self.base_committed_len + len(self.token_ids)


class Close(_Message, tag=3):
    """Tells the drafter that it may forget a request."""

    request: Int31
    reason: CloseReason


class SparseQ(_Message, eq=False):
    """Holds the truncated, renormalised distributions that drafts were sampled from: the drafter's q.

    ids: int32 [k, n], no id twice in a row. probs: float32 [k, n], each row summing to 1.
    A row with fewer than n tokens in its support is filled up with other ids at probability 0.
    """

    ids: np.ndarray
    probs: np.ndarray

    def __post_init__(self) -> None:
        ids, probs = self.ids, self.probs
        if ids.dtype != np.int32 or ids.ndim != 2 or ids.size == 0:
            raise MessageError("Proposals.q_ids", f"must be int32 [k, n], found {ids.dtype} {list(ids.shape)}")
        if probs.dtype != np.float32 or probs.shape != ids.shape:
            raise MessageError(
                "Proposals.q_probs", f"must be float32 {list(ids.shape)}, found {probs.dtype} {list(probs.shape)}"
            )
        # Written so that NaN fails; errstate because a foreign bit pattern may be a signalling NaN.
        with np.errstate(invalid="ignore"):
            if not ((probs >= 0) & (probs <= 1 + Q_SUM_TOLERANCE)).all():
                raise MessageError("Proposals.q_probs", "a probability is negative, above 1 or not finite")
        sums = probs.sum(axis=1)
        if not (np.abs(sums - 1) <= Q_SUM_TOLERANCE).all():
            raise MessageError("Proposals.q_probs", f"rows sum to between {sums.min():.6g} and {sums.max():.6g}, not 1")
        _check_rows("Proposals.q_ids", ids)


class DraftPath(_Message):
    """Holds another continuation of the text than a proposal's main line: a path from a draft tree's root to a leaf.

    token_ids: all its tokens, those it shares with the main line included. gain: tokens that are expected to be
    accepted beyond what the main line and the paths before this one bring.
    """

    token_ids: TokenIds
    gain: float

    def __post_init__(self) -> None:
        if not 0 <= self.gain <= len(self.token_ids):  # NaN fails
            raise MessageError("Proposals.paths", f"a gain of {self.gain} with {len(self.token_ids)} tokens")


class Proposals(_Message, tag=4):
    """Carries draft tokens for one request, 0 to K of them; none unless `status` is OK.

    base_committed_len: the committed length the drafts continue, `Commit.committed_len` of the commit answered. It
    tells a late answer from a current one.
    q: what the drafts were sampled from, when the verifier shall reject against it.
    origin: whether the outcome was drafted for ahead. step_us: what a step of the drafter takes now, microseconds; 0
    where nothing is known.
    paths: further paths of the draft tree whose main line token_ids is, the best first; none with a q.
    """

    request: Int31
    base_committed_len: Int31
    token_ids: Sequence[Int31]
    status: ProposalStatus = ProposalStatus.OK
    q: SparseQ | None = None
    origin: DraftOrigin = DraftOrigin.NONE
    step_us: Int31 = 0
    paths: Annotated[tuple[DraftPath, ...], Meta(max_length=MAX_PATHS - 1)] = ()

    def __post_init__(self) -> None:
        if len(self.token_ids) and self.status is not ProposalStatus.OK:
            raise MessageError("Proposals.token_ids", f"{len(self.token_ids)} ids with status {self.status.name}")
        if self.paths and not len(self.token_ids):
            raise MessageError("Proposals.paths", "there is no main line")
        if self.q is not None:
            if self.paths:
                raise MessageError("Proposals.paths", "a proposal with a q is a chain")
            if len(self.q.ids) != len(self.token_ids):
                raise MessageError("Proposals.q_ids", f"{len(self.q.ids)} rows for {len(self.token_ids)} drafts")
            drafts = np.asarray(self.token_ids)[:, None]
            if not ((self.q.ids == drafts) & (self.q.probs > 0)).any(axis=1).all():
                raise MessageError("Proposals.q_probs", "a draft has probability 0: q is not what it was sampled from")


class PrefetchedProposal(_Message, tag=5):
    """Carries drafts for one outcome of a round that is still being verified.

    The verifier has them when that outcome comes. They are sent once a chain's drafts are complete, and only where
    drafts depend on text and seed alone, so that their q need not travel. One that is lost or comes too late costs
    nothing: the commit is answered.

    base_committed_len: as in the Proposals that are being verified. position, next_token: the outcome: at this position
    of the text, behind accepted drafts, the target chooses this token. token_ids: 1 to K drafts that follow it.
    origin, step_us: as in Proposals.
    """

    request: Int31
    base_committed_len: Int31
    position: Int31
    next_token: Int31
    token_ids: TokenIds
    origin: DraftOrigin
    step_us: Int31 = 0


class TrainingSample(_Message, tag=6, eq=False):
    """Carries the target's likeliest tokens at positions that it has committed, for a drafter that learns.

    It is sent after their Commit, when nobody waits for it; one that is lost costs nothing but learning.

    position: of the first row's token in the text, prompt included; row j is of the token at position + j.
    ids: int32 [n, TAUGHT_TOP], the target's likeliest tokens there, the likeliest first, no id twice in a row; fewer
    columns where the vocabulary is smaller. log_p: float16, likewise: their log-probabilities at temperature 1.
    """

    request: Int31
    position: Int31
    ids: np.ndarray
    log_p: np.ndarray

    def __post_init__(self) -> None:
        ids, log_p = self.ids, self.log_p
        if ids.dtype != np.int32 or ids.ndim != 2 or ids.size == 0 or ids.shape[1] > TAUGHT_TOP:
            raise MessageError(
                "TrainingSample.ids", f"must be int32 [n, {TAUGHT_TOP}], found {ids.dtype} {list(ids.shape)}"
            )
        if log_p.dtype != np.float16 or log_p.shape != ids.shape:
            raise MessageError("TrainingSample.log_p", f"must be float16 {list(ids.shape)}, found {log_p.dtype}")
        _check_rows("TrainingSample.ids", ids)
        with np.errstate(invalid="ignore"):
            if not (log_p <= _LOG_P_TOLERANCE).all():  # NaN fails
                raise MessageError("TrainingSample.log_p", "a log-probability is above 0 or not a number")
        sums = np.exp(log_p.astype(np.float32)).sum(axis=1)
        if not (sums <= 1 + TAUGHT_SUM_TOLERANCE).all():
            raise MessageError("TrainingSample.log_p", f"a row sums to {sums.max():.6g}, more than 1")


Message: TypeAlias = Open | Commit | Close | Proposals | PrefetchedProposal | TrainingSample


def _check_rows(field: str, ids: np.ndarray) -> None:
    """Raise MessageError unless each row has distinct ids, none of them negative."""
    in_order = np.sort(ids, axis=1)
    if in_order[:, 0].min() < 0:
        raise MessageError(field, "a negative id")
    if (in_order[:, 1:] == in_order[:, :-1]).any():
        raise MessageError(field, "an id stands twice in one row")


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
