"""Defines the requests, outputs and errors of calls to a target replica.

A generation over gRPC is a GenerationRequest and comes back as RoundOutputs, one a round. A request of OpenAI's API is
an HttpCall. The ingress loads this module, so it does not import vLLM.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from outrider.actors.request_ids import scoped_id
from outrider.actors.serving.routing.request_profile import RoutedRequest, of_generation

logger = logging.getLogger("ray.serve.outrider.routing")


class MayHaveDeadline:
    """Adds the time left to a request that may have a deadline."""

    deadline: Deadline | None

    def seconds_left(self) -> float | None:
        """Returns the seconds until the deadline, negative once it has passed; None without one."""
        return None if self.deadline is None else self.deadline.left_s()


@dataclass(frozen=True)
class GenerationRequest(MayHaveDeadline):
    """Holds a validated request. Exactly one of prompt_text, prompt_token_ids and prompt_chat is set."""

    request_id: str
    prompt_text: str | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    apply_chat_template: bool = False
    """prompt_text is what one user says."""

    sampling: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of vLLM's SamplingParams: only what the client set. ``structured_outputs`` is a dict with one
    keyword argument of StructuredOutputsParams."""

    speculation: bool = True
    num_speculative_tokens: int | None = None
    """At most this many drafts a round; None: the deployment's."""

    verification: str | None = None
    """``rejection``, ``block`` or ``coupled``; None: as the deployment is configured (see verification.mode)."""

    deadline: Deadline | None = None
    """When it passes, the engine drops the request."""

    prompt_chat: ChatPrompt | None = None

    trace_headers: dict[str, str] = field(default_factory=dict)
    """W3C trace headers of the ingress's span; empty when tracing is off."""

    avoid_replicas: tuple[str, ...] = ()
    """Replicas that were lost with this request before it had any output; see outrider.actors.serving.running."""

    tenant: int = 0
    """The caller whose remembered answers it may use and adds to; 0: all callers share them."""

    caller: int = 0
    """A hash, 64 bits, of the key or address that sent it; 0: unknown. Request ids are each caller's own."""

    cache_salt: str | None = None
    """Prompts share cached blocks with prompts of the same salt only."""

    adapter: str | None = None
    """Name of the LoRA adapter that the target applies; None: no adapter."""

    @property
    def engine_id(self) -> str:
        return scoped_id(self.caller, self.request_id)

    @property
    def num_answers(self) -> int:
        """Returns n. Each answer ends with a finish_reason of its own."""
        return int(self.sampling.get("n", 1))

    @property
    def routed(self) -> RoutedRequest:
        """Returns what the router needs to know of the request."""
        return of_generation(self)


@dataclass(frozen=True)
class HttpCall(MayHaveDeadline):
    """Holds a request for vLLM's own HTTP app in a replica."""

    method: str
    path: str
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    request_id: str
    routed: RoutedRequest | None
    """Profile for the router; None: the call generates nothing."""

    caller: int = 0
    """This and the next three fields are those of GenerationRequest."""

    tenant: int = 0
    deadline: Deadline | None = None
    avoid_replicas: tuple[str, ...] = ()


@dataclass(frozen=True)
class HttpHead:
    """Holds status and headers of a response, which come before the parts of its body."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...] = ()


@dataclass(frozen=True)
class Deadline:
    """Marks the moment of this process's monotonic clock after which an answer is of no use.

    Pickling stores the time left, and unpickling counts it down on the clock of the other process: clocks of two nodes
    cannot be compared, and wall-clock time can be set.
    """

    at_s: float
    clock: Callable[[], float] = field(default=time.monotonic, compare=False, repr=False)

    @classmethod
    def after(cls, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> Deadline:
        return cls(clock() + timeout_s, clock)

    def left_s(self) -> float:
        """Returns the seconds left, negative once it has passed."""
        return self.at_s - self.clock()

    def __reduce__(self) -> tuple[Callable[[float], Deadline], tuple[float]]:
        return Deadline.after, (self.left_s(),)


@dataclass(frozen=True)
class ChatMessage:
    role: str
    content: str
    name: str | None = None


@dataclass(frozen=True)
class ChatPrompt:
    """Holds a conversation, and how the model's chat template makes a prompt of it."""

    messages: tuple[ChatMessage, ...]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further variables of the template: plain JSON values."""


@dataclass(frozen=True)
class RoundOutput:
    """Holds what one round committed for one answer. The answer's last one has finish_reason set."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    """``stop``, ``length`` or ``abort``; None while running. Another name of vLLM's is passed on as it is."""

    stop_reason: str | None = None
    """The stop string, or the stop token id as text, when one ended the answer."""

    usage: Usage | None = None
    """Tokens of this answer so far, with those of the prompt. Set in a request's first outputs and an answer's last."""

    speculative_decoding: SpeculativeDecodingMetrics | None = None
    """This and the next in an answer's last output only."""

    timing: RequestTiming | None = None

    index: int = 0
    """Index of the answer among the n answers."""

    logprobs: tuple[TokenLogprobs, ...] = ()
    """One entry per token of token_ids, or none when they were not asked for."""

    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    """One entry per token of the prompt, None for the first. In the first output of a request only."""

    origins: tuple[str, ...] = ()
    """One per token of token_ids, by the names of outrider.actors.round.origins; empty: not known."""

    num_rounds: int = 0
    """Rounds that produced these tokens: several when the reader is slower than the target. 0: not known."""


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True)
class SpeculativeDecodingMetrics:
    """Counts the drafts of a request, by vLLM's names. A spec step is a round with at least one drafted token."""

    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    mean_acceptance_length: float = 1.0
    """1 + accepted / steps, with the bonus token."""

    draft_acceptance_rate: float = 0.0
    acceptance_histogram: tuple[int, ...] = ()
    """Index j: rounds in which j drafts were accepted. Length K + 1."""


@dataclass(frozen=True)
class RequestTiming:
    """Holds seconds of one request in the target replica, by the names of vLLM's request metrics. 0: not reached."""

    queue_time_s: float
    """Arrival in the engine to the first step with the request."""

    prefill_time_s: float
    """That step to the first token."""

    decode_time_s: float
    """First token to the last one."""

    e2e_latency_s: float
    """Arrival in the replica to the end."""


class TokenLogprob(NamedTuple):
    """Holds one token's log-probability.

    logprob: natural logarithm of the model's own probability, before every sampling parameter. This and TokenLogprobs
    are tuples: thousands come at once, and a dataclass takes fifty times as long to pickle.
    """

    token_id: int
    logprob: float


class TokenLogprobs(NamedTuple):
    """Holds log-probabilities at one position of a prompt or an answer."""

    token_id: int
    logprob: float
    rank: int
    """Rank in the vocabulary, 1 for the likeliest token."""

    top: tuple[TokenLogprob, ...] = ()
    """The likeliest tokens, best first: as many as asked for."""


@dataclass(frozen=True)
class TokenizeRequest:
    """Holds a prompt to tokenise. Exactly one of text and chat is set."""

    text: str | None = None
    chat: ChatPrompt | None = None
    add_special_tokens: bool | None = None
    """None: True for text, False for chat."""

    return_token_strs: bool = False


@dataclass(frozen=True)
class Tokens:
    """Holds the token ids of a prompt."""

    token_ids: tuple[int, ...]
    max_model_len: int
    token_strs: tuple[str, ...] = ()
    """The vocabulary's spelling of each, when asked for."""


@dataclass(frozen=True)
class ModelInfo:
    max_model_len: int
    vocab_size: int
    dtype: str
    architecture: str
    tokenizer: str
    """Class of the tokenizer."""

    has_chat_template: bool
    eos_token_ids: tuple[int, ...]
    verifications: tuple[str, ...] = ()
    """Ways to verify drafts that a request may ask for, by the names of outrider.cluster.modes."""

    default_verification: str | None = None
    methods: tuple[str, ...] = ()
    num_speculative_tokens: int = 0
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None


@dataclass(frozen=True)
class ReplicaReply:
    """Holds one replica's reply to a broadcast: value, or error when it failed or was late."""

    replica_id: str | None
    """Serve's unique id of the replica; None when it died or was late: replies carry it."""

    value: Any = None
    error: str | None = None
    is_late: bool = False
    """It did not answer in time."""

    @property
    def ok(self) -> bool:
        return self.error is None


Broadcast = Callable[..., Awaitable[list[ReplicaReply]]]
"""The type of ``outrider.actors.serve_adapter.broadcast.broadcast(handle, method, *args, timeout_s=...)``.

It is passed in, since only the adapter uses private names of Serve."""


async def sign(target: Any, replica_id: str, method: str, args: tuple[Any, ...]) -> ReplicaReply:
    """Calls the coroutine method of target, as the replica's side of a broadcast, and adds the replica's id to the
    reply."""
    try:
        return ReplicaReply(replica_id, value=await getattr(target, method)(*args))
    except Exception as error:
        logger.warning("%s failed on replica %s", method, replica_id, exc_info=error)
        return ReplicaReply(replica_id, error=f"{type(error).__name__}: {error}")


class RequestError(Exception):
    """Refuses a request.

    field: the request field at fault, in the public API's spelling, e.g. ``sampling.temperature``.
    fix: what to send instead.
    """

    def __init__(self, field: str, problem: str, fix: str) -> None:
        super().__init__(field, problem, fix)
        self.field, self.problem, self.fix = field, problem, fix

    def __str__(self) -> str:
        return f"{self.field}: {self.problem}; {self.fix}"


class RequestIdInUse(Exception):
    """Refuses a request whose id is that of a running one."""

    def __init__(self, request_id: str) -> None:
        super().__init__(request_id)
        self.request_id = request_id

    def __str__(self) -> str:
        return f"request_id: {self.request_id!r} is the id of a running request; send another one, or none"


class ReplicaLost(ConnectionError):
    """Reports a replica whose engine is dead, from the replica itself. Serve will replace it."""

    def __init__(self, replica_id: str, problem: str) -> None:
        super().__init__(replica_id, problem)
        self.replica_id, self.problem = replica_id, problem

    def __str__(self) -> str:
        return f"replica {self.replica_id}: {self.problem}"


LIMITS = ("structured_outputs", "allowed_token_ids", "bad_words", "repetition_penalty")
"""Sampling parameters that may leave no token to choose: a JSON schema that refers to itself and nothing else, say."""


class SamplingFailed(Exception):
    """Reports a request whose next token the engine could not choose, where none of LIMITS may be the reason.

    Other requests go on.
    """

    WHY = "the model's logits for the next token were not finite"

    def __init__(self, request_id: str) -> None:
        super().__init__(request_id)
        self.request_id = request_id

    def __str__(self) -> str:
        return f"request {self.request_id}: {self.WHY}"
