"""The messages between verifier and drafter.

Every message checks itself when it is made, also when it is made from what a peer has sent, so a wrong one fails where
the mistake is. The wire form is in ``cluster/link/codec.py``.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import msgspec
import numpy as np

from outrider.cluster.link.frame import MAX_INT31
from outrider.cluster.modes import MAX_PATHS, Mode

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


class DraftOrigin(enum.IntEnum):
    """Tells where the drafts of an answer come from."""

    NONE = 0
    """No answer in time, or one without drafts for another reason than its length."""

    MAIN_LINE = 1
    """Drafted ahead: every draft was accepted and the bonus token was the one guessed. Or looked up beside a model."""

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
    remembered: False: this answer is not added to it.
    adapter: number of the drafter's own LoRA adapter, counted from 1 as they are configured; 0: none.
    """

    mode: Mode = Mode.GREEDY
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    top_n: int = 64
    biases: tuple[tuple[int, float], ...] = ()
    only_biased: bool = False
    tenant: int = 0
    remembered: bool = True
    adapter: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.mode, Mode):
            raise MessageError("Open.mode", f"unknown mode {self.mode}")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise MessageError("Open.temperature", f"{self.temperature} is not a finite number from 0 up")
        if self.mode is not Mode.GREEDY and self.temperature == 0:
            raise MessageError("Open.temperature", f"0 with mode {self.mode.name}")
        if not 0 <= self.top_k <= MAX_INT31:
            raise MessageError("Open.top_k", f"{self.top_k} is not in 0 to {MAX_INT31}")
        if not 0 < self.top_p <= 1:
            raise MessageError("Open.top_p", f"{self.top_p} is not in (0, 1]")
        if not 0 <= self.min_p <= 1:
            raise MessageError("Open.min_p", f"{self.min_p} is not in [0, 1]")
        if not -(2**63) <= self.seed < 2**63:
            raise MessageError("Open.seed", f"{self.seed} is no 64-bit integer")
        if not 0 <= self.tenant < 2**63:
            raise MessageError("Open.tenant", f"{self.tenant} is not in 0 to 2**63 - 1")
        if not 0 <= self.adapter <= MAX_ADAPTERS:
            raise MessageError("Open.adapter", f"{self.adapter} is not in 0 to {MAX_ADAPTERS}")
        if not 0 <= self.top_n <= MAX_TOP_N:
            raise MessageError("Open.top_n", f"{self.top_n} is not in 0 to {MAX_TOP_N}")
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
    """Holds how messages travel: as an array of the type's tag and the fields."""


class Open(_Message, tag=1):
    """Asks the drafter to follow a request.

    request: a handle of this link, 0 to 2**31-1, never used twice in the link's life. A request that comes back
        after preemption gets a new one, and its token_ids then contain the output committed so far.
    token_ids: the whole text.
    """

    request: int
    token_ids: Sequence[int]
    num_speculative_tokens: int
    sampling: DraftSampling

    def __post_init__(self) -> None:
        _check_int31("Open.request", self.request)
        if len(self.token_ids) < 1:
            raise MessageError("Open.token_ids", "empty")
        _check_int31("Open.num_speculative_tokens", self.num_speculative_tokens)


class Commit(_Message, tag=2):
    """Reports the outcome of a round for one request: the accepted drafts and the next token.

    base_committed_len: tokens committed before these, prompt included. The ids travel, so the drafter need not
    remember what was verified.
    num_wanted: drafts wanted for the next round; 0: none, and no answer. num_on_miss: if this outcome was not foreseen,
    drafts worth waiting for; with 0 such a commit is answered at once, without drafts.
    has_drafts: the verifier has as many already, from a PrefetchedProposal for this outcome, and awaits no answer.
    num_paths: paths wanted for the next round, the main line included; 1: a chain. After a proposal with further paths
    the drafter drafts nothing ahead.
    """

    request: int
    base_committed_len: int
    token_ids: Sequence[int]
    num_wanted: int
    num_on_miss: int
    has_drafts: bool = False
    num_paths: int = 1

    def __post_init__(self) -> None:
        _check_int31("Commit.request", self.request)
        if len(self.token_ids) < 1:
            raise MessageError("Commit.token_ids", "empty: a round commits at least the next token")
        if self.base_committed_len < 0 or self.committed_len > MAX_INT31:
            raise MessageError("Commit.base_committed_len", f"{self.base_committed_len} is no length")
        _check_int31("Commit.num_wanted", self.num_wanted)
        if not 0 <= self.num_on_miss <= self.num_wanted:
            raise MessageError("Commit.num_on_miss", f"{self.num_on_miss} is not in 0 to {self.num_wanted} wanted")
        if self.has_drafts and not self.num_wanted:
            raise MessageError("Commit.has_drafts", "set, but none are wanted")
        if not 1 <= self.num_paths <= MAX_PATHS:
            raise MessageError("Commit.num_paths", f"{self.num_paths} is not in 1 to {MAX_PATHS}")

    @property
    def accepted_len(self) -> int:
        return len(self.token_ids) - 1

    @property
    def committed_len(self) -> int:
        """Returns the number of tokens committed now, which Proposals that answer this are based on."""
        return self.base_committed_len + len(self.token_ids)


class Close(_Message, tag=3):
    """Tells the drafter that it may forget a request."""

    request: int
    reason: CloseReason

    def __post_init__(self) -> None:
        _check_int31("Close.request", self.request)


class SparseQ(msgspec.Struct, eq=False, array_like=True, forbid_unknown_fields=True):
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
        in_order = np.sort(ids, axis=1)
        if in_order[:, 0].min() < 0:
            raise MessageError("Proposals.q_ids", "a negative id")
        if (in_order[:, 1:] == in_order[:, :-1]).any():
            raise MessageError("Proposals.q_ids", "an id stands twice in one row")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SparseQ):
            return NotImplemented
        return np.array_equal(self.ids, other.ids) and np.array_equal(self.probs, other.probs)

    __hash__ = None  # type: ignore[assignment]


class DraftPath(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Holds another continuation of the text than a proposal's main line: a path from a draft tree's root to a leaf.

    token_ids: all its tokens, those it shares with the main line included. gain: tokens that are expected to be
    accepted beyond what the main line and the paths before this one bring.
    """

    token_ids: Sequence[int]
    gain: float

    def __post_init__(self) -> None:
        if not self.token_ids:
            raise MessageError("Proposals.paths", "a path has no tokens")
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

    request: int
    base_committed_len: int
    token_ids: Sequence[int]
    status: ProposalStatus = ProposalStatus.OK
    q: SparseQ | None = None
    origin: DraftOrigin = DraftOrigin.NONE
    step_us: int = 0
    paths: tuple[DraftPath, ...] = ()

    def __post_init__(self) -> None:
        _check_int31("Proposals.request", self.request)
        _check_int31("Proposals.base_committed_len", self.base_committed_len)
        _check_int31("Proposals.step_us", self.step_us)
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

    request: int
    base_committed_len: int
    position: int
    next_token: int
    token_ids: Sequence[int]
    origin: DraftOrigin
    step_us: int = 0

    def __post_init__(self) -> None:
        _check_int31("PrefetchedProposal.request", self.request)
        _check_int31("PrefetchedProposal.base_committed_len", self.base_committed_len)
        _check_int31("PrefetchedProposal.next_token", self.next_token)
        _check_int31("PrefetchedProposal.step_us", self.step_us)
        if not self.base_committed_len <= self.position <= MAX_INT31:
            raise MessageError("PrefetchedProposal.position", f"{self.position} is before {self.base_committed_len}")
        if not self.token_ids:
            raise MessageError("PrefetchedProposal.token_ids", "empty: there is nothing to take")


class Name(_Message, tag=6):
    """Tells the drafter the id by which the engine knows a request, for its log. It is sent before the request's Open.

    request_id: 1 to MAX_NAME_LENGTH printable ASCII characters.
    """

    request: int
    request_id: str

    def __post_init__(self) -> None:
        _check_int31("Name.request", self.request)
        if not 1 <= len(self.request_id) <= MAX_NAME_LENGTH:
            raise MessageError("Name.request_id", f"{len(self.request_id)} characters, 1 to {MAX_NAME_LENGTH} are sent")
        if not (self.request_id.isascii() and self.request_id.isprintable()):
            raise MessageError("Name.request_id", "not printable ASCII")


class TrainingSample(_Message, tag=7, eq=False):
    """Carries the target's likeliest tokens at positions that it has committed, for a drafter that learns.

    It is sent after their Commit, when nobody waits for it; one that is lost costs nothing but learning.

    position: of the first row's token in the text, prompt included; row j is of the token at position + j.
    ids: int32 [n, TAUGHT_TOP], the target's likeliest tokens there, the likeliest first, no id twice in a row; fewer
    columns where the vocabulary is smaller. log_p: float16, likewise: their log-probabilities at temperature 1.
    """

    request: int
    position: int
    ids: np.ndarray
    log_p: np.ndarray

    def __post_init__(self) -> None:
        _check_int31("TrainingSample.request", self.request)
        _check_int31("TrainingSample.position", self.position)
        ids, log_p = self.ids, self.log_p
        if ids.dtype != np.int32 or ids.ndim != 2 or ids.size == 0 or ids.shape[1] > TAUGHT_TOP:
            raise MessageError(
                "TrainingSample.ids", f"must be int32 [n, {TAUGHT_TOP}], found {ids.dtype} {list(ids.shape)}"
            )
        if log_p.dtype != np.float16 or log_p.shape != ids.shape:
            raise MessageError("TrainingSample.log_p", f"must be float16 {list(ids.shape)}, found {log_p.dtype}")
        in_order = np.sort(ids, axis=1)
        if in_order[:, 0].min() < 0:
            raise MessageError("TrainingSample.ids", "a negative id")
        if (in_order[:, 1:] == in_order[:, :-1]).any():
            raise MessageError("TrainingSample.ids", "an id stands twice in one row")
        with np.errstate(invalid="ignore"):
            if not (log_p <= _LOG_P_TOLERANCE).all():  # NaN fails
                raise MessageError("TrainingSample.log_p", "a log-probability is above 0 or not a number")
        sums = np.exp(log_p.astype(np.float32)).sum(axis=1)
        if not (sums <= 1 + TAUGHT_SUM_TOLERANCE).all():
            raise MessageError("TrainingSample.log_p", f"a row sums to {sums.max():.6g}, more than 1")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TrainingSample):
            return NotImplemented
        same = (self.request, self.position) == (other.request, other.position)
        return same and np.array_equal(self.ids, other.ids) and np.array_equal(self.log_p, other.log_p)

    __hash__ = None  # type: ignore[assignment]


Message: TypeAlias = Open | Commit | Close | Proposals | PrefetchedProposal | Name | TrainingSample


def _check_int31(field: str, value: int) -> None:
    if not 0 <= value <= MAX_INT31:
        raise MessageError(field, f"{value} is not in 0 to {MAX_INT31}")
