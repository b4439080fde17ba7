"""What the front doors ask of a target replica, what comes back, how it fails, and the rules that a request is held
against whichever API it comes by.

A generation over gRPC is a GenerationRequest, and comes back as RoundOutputs, one a round. One over OpenAI's API is an
OpenAIRequest, and comes back as an OpenAIHead and then the body in parts. Free of vLLM: the ingress loads this.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Literal, NamedTuple

from outrider.actors.request_ids import scoped_id
from outrider.cluster.limits import LimitsConfig
from outrider.cluster.modes import check_exact_under_grammar

logger = logging.getLogger("ray.serve.outrider.routing")


BYTES_PER_TOKEN = 4
"""Of text, roughly."""


class _MayHaveDeadline:
    deadline: Deadline | None

    def seconds_left(self) -> float | None:
        """Until the deadline, negative once it has passed. None without one."""
        return None if self.deadline is None else self.deadline.left_s()


@dataclass(frozen=True)
class GenerationRequest(_MayHaveDeadline):
    """A validated request. Exactly one of prompt_text, prompt_token_ids and prompt_chat is set."""

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
    """After which the answer is worthless; the engine then drops the request."""

    prompt_chat: ChatPrompt | None = None

    trace_headers: dict[str, str] = field(default_factory=dict)
    """W3C trace headers of the ingress's span; empty when tracing is off."""

    avoid_replicas: tuple[str, ...] = ()
    """Replicas that were lost with this request before it had any output; see outrider.actors.serving.running."""

    tenant: int = 0
    """Whose memory of answers it may learn from and adds to; 0: everybody's."""

    caller: int = 0
    """Whose it is, for fair order among callers; 0: nobody knows."""

    asker: int = 0
    """Whose it is where work for strangers is shared out: the key's, else the address's; 0: nobody knows."""

    learns: bool = True
    """A drafter that learns may do so from its answer, and one that remembers answers may remember it."""

    cache_salt: str | None = None
    """Prompts share cached blocks with prompts of the same salt only."""

    adapter: str | None = None
    """That the target answers it with, by its name; None: with none."""

    in_one_piece: bool = False
    """Its answers are told when all of them have ended, and not by rounds."""

    way_out: tuple[str, ...] = ()
    """Processes that the answer goes through, see outrider.actors.serving.ways_out."""

    @property
    def engine_id(self) -> str:
        return scoped_id(self.caller, self.request_id)

    @property
    def num_answers(self) -> int:
        """n: each answer ends with a finish_reason of its own."""
        return int(self.sampling.get("n", 1))

    @property
    def max_tokens(self) -> int | None:
        """Of one answer; None: what max_model_len leaves."""
        return self.sampling.get("max_tokens")

    @property
    def logprobs(self) -> int | None:
        """Likeliest tokens asked for with each of an answer; None: no log-probabilities."""
        return self.sampling.get("logprobs")

    @property
    def prompt_logprobs(self) -> int | None:
        """Likewise of the prompt."""
        return self.sampling.get("prompt_logprobs")

    @property
    def prompt_tokens(self) -> int:
        """Estimated, but for prompts of token ids."""
        if self.prompt_token_ids is not None:
            return len(self.prompt_token_ids)
        if self.prompt_chat is not None:
            return sum(len(message.content) for message in self.prompt_chat.messages) // BYTES_PER_TOKEN
        return len(self.prompt_text or "") // BYTES_PER_TOKEN


@dataclass(frozen=True)
class Deadline:
    """A moment of this process's monotonic clock after which an answer is worthless.

    Wall-clock times are never compared: nodes disagree about them, and they are set back and forward. Each process
    counts on its own monotonic clock. Pickled, this is the time that is left, which goes on being counted where it is
    unpickled.
    """

    at_s: float
    clock: Callable[[], float] = field(default=time.monotonic, compare=False, repr=False)

    @classmethod
    def after(cls, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> Deadline:
        return cls(clock() + timeout_s, clock)

    def left_s(self) -> float:
        """Negative once it has passed."""
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
    """A conversation, and how the model's chat template makes a prompt of it."""

    messages: tuple[ChatMessage, ...]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further variables of the template: plain JSON values."""


@dataclass(frozen=True)
class RoundOutput:
    """What one round committed for one answer. The answer's last one has finish_reason set."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    """``stop``, ``length`` or ``abort``; None while running. Another name of vLLM's is passed on as it is."""

    stop_reason: str | None = None
    """The stop string, or the stop token id as text, when one ended the answer."""

    usage: Usage | None = None
    """Of this answer so far, the prompt's tokens counted in each. In a request's first outputs and an answer's last."""

    speculative_decoding: SpeculativeDecodingMetrics | None = None
    """This and the next in an answer's last output only."""

    timing: RequestTiming | None = None

    index: int = 0
    """Which of the n answers."""

    logprobs: tuple[TokenLogprobs, ...] = ()
    """One entry per token of token_ids, or none when they were not asked for."""

    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    """One entry per token of the prompt, None for the first. In the first output of a request only."""

    origins: tuple[str, ...] = ()
    """One per token of token_ids, in the names of outrider.actors.round.origins; or none, which is all unknown."""

    num_rounds: int = 0
    """Rounds that these tokens are of: several when whoever reads is slower than the target. 0: not known."""

    load: ReplicaLoad | None = None
    """Of the target that answered. In an answer's last output only."""


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True)
class SpeculativeDecodingMetrics:
    """Per request, in vLLM's names. A spec step is a round in which at least one token was drafted."""

    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    mean_acceptance_length: float = 1.0
    """With the bonus token: 1 + accepted / steps."""

    draft_acceptance_rate: float = 0.0
    acceptance_histogram: tuple[int, ...] = ()
    """Index j: rounds in which j drafts were accepted. Length K + 1."""


@dataclass(frozen=True)
class RequestTiming:
    """Seconds of one request in the target replica, by the names of vLLM's request metrics. 0: it did not get there."""

    queue_time_s: float
    """From its arrival in the engine to the first step it was part of."""

    prefill_time_s: float
    """From there to its first token."""

    decode_time_s: float
    """From its first token to its last."""

    e2e_latency_s: float
    """From its arrival in the replica to its end."""


class TokenLogprob(NamedTuple):
    """logprob: natural logarithm of the model's own probability, before every sampling parameter. A tuple, like the
    next: thousands of them come at once, and a dataclass takes fifty times as long to pickle."""

    token_id: int
    logprob: float


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position of a prompt or an answer."""

    token_id: int
    logprob: float
    rank: int
    """In the vocabulary, 1 for the likeliest."""

    top: tuple[TokenLogprob, ...] = ()
    """The likeliest tokens, best first: as many as asked for."""


@dataclass(frozen=True)
class ReplicaLoad:
    """Requests in one target's engine, as its scheduler last said."""

    running: int
    waiting: int
    kv_cache_usage: float
    """0 to 1."""

    max_num_seqs: int
    """Requests it can run at once."""


OF_THE_CALLER = frozenset({"caller", "asker", "tenant", "learn"})
"""Round options that say who asks, and not what for."""

Endpoint = Literal["chat", "completions", "responses", "tokenize", "detokenize", "models", "openapi"]
"""``/v1/chat/completions``, ``/v1/completions``, ``/v1/responses``, ``/tokenize``, ``/detokenize``, ``/v1/models``,
``/openapi.json``."""

GENERATING: frozenset[Endpoint] = frozenset({"chat", "completions", "responses"})
"""Endpoints that keep the engine busy."""


@dataclass(frozen=True)
class OpenAIRequest(_MayHaveDeadline):
    """A request whose fields have been checked by name (actors/serving/openai/door.py). Values are vLLM's to check."""

    endpoint: Endpoint
    request_id: str
    body: dict[str, Any] = field(default_factory=dict)
    """Decoded JSON in vLLM's schema, without fields of ours."""

    round_options: dict[str, Any] = field(default_factory=dict)
    """What goes under EXTRA_ARGS_KEY into SamplingParams.extra_args: see outrider.actors.round.request."""

    trace_headers: dict[str, str] = field(default_factory=dict)
    """``traceparent``, ``tracestate`` of the caller."""

    avoid_replicas: tuple[str, ...] = ()
    """Replicas that have just failed this request."""

    deadline: Deadline | None = None
    """After which the answer is worthless."""

    adapter: str | None = None
    """What ``model`` in the body names, where that is not the model itself."""

    way_out: tuple[str, ...] = ()
    """As of a GenerationRequest."""

    @property
    def num_answers(self) -> int:
        """Prompts times n."""
        n = self.body.get("n")
        return len(self.prompts()) * (n if isinstance(n, int) and n > 0 else 1)

    @property
    def max_tokens(self) -> int | None:
        """Of one answer; None: what max_model_len leaves, or vLLM's default."""
        asked = next(
            filter(None, map(self.body.get, ("max_completion_tokens", "max_tokens", "max_output_tokens"))), None
        )
        return asked if isinstance(asked, int) and asked > 0 else None

    @property
    def logprobs(self) -> int | None:
        """Likeliest tokens asked for with each of an answer; None: no log-probabilities."""
        if self.endpoint == "completions":
            return _number(self.body.get("logprobs"))
        if self.endpoint == "chat" and not self.body.get("logprobs"):
            return None
        if self.endpoint == "responses" and not self.body.get("top_logprobs"):
            return None
        return _number(self.body.get("top_logprobs")) or 0

    @property
    def prompt_logprobs(self) -> int | None:
        """Likewise of the prompt, which vLLM echoes with as many as are asked for of the answer."""
        asked = _number(self.body.get("prompt_logprobs"))
        if asked is not None or not self.body.get("echo"):
            return asked
        return self.logprobs if self.endpoint == "completions" else _number(self.body.get("top_logprobs")) or 0

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts, with the tools and documents that a template puts beside them. Estimated, but for prompts of
        token ids."""
        beside = chars_beside(self.body)
        if self.endpoint == "chat":
            messages = self.body.get("messages")
            contents = [each.get("content") for each in messages or () if isinstance(each, dict)]
            return (beside + sum(_text_length(content) for content in contents)) // BYTES_PER_TOKEN
        if self.endpoint == "responses":
            said = sum(len(content) for _, content in spoken_in_response(self.body))
            return (beside + said) // BYTES_PER_TOKEN
        return sum(
            len(prompt) if isinstance(prompt, list) else _text_length(prompt) // BYTES_PER_TOKEN
            for prompt in self.prompts()
        )

    def prompts(self) -> list[Any]:
        """A completion's; one, of whatever is none."""
        prompt = self.body.get("prompt")
        if self.endpoint != "completions" or not isinstance(prompt, list) or not prompt or isinstance(prompt[0], int):
            return [prompt]
        return prompt


BESIDE_MESSAGES = ("tools", "documents", "chat_template_kwargs")
"""Fields of a chat or response whose texts its template may use."""


def num_chars(value: Any, *, keys: bool = False) -> int:
    """Of all texts in a value of JSON. keys: of its objects' keys too."""
    chars, left = 0, [value]
    while left:
        found = left.pop()
        if isinstance(found, str):
            chars += len(found)
        elif isinstance(found, dict):
            chars += sum(map(len, found)) if keys else 0
            left.extend(found.values())
        elif isinstance(found, list):
            left.extend(found)
    return chars


def chars_beside(body: Mapping[str, Any]) -> int:
    """Of all that the template of a chat or response may use beside its messages."""
    return sum(num_chars(body.get(name), keys=True) for name in BESIDE_MESSAGES)


def _number(value: Any) -> int | None:
    """None for what is none: the door lets no other number pass."""
    return max(0, value) if isinstance(value, int) else None


def spoken(content: Any) -> str:
    """text_of, with as much in place of each picture as it counts for, which tells it from others."""
    if not isinstance(content, list):
        return text_of(content)
    return "".join(map(_spoken_part, (part for part in content if isinstance(part, dict))))


def _spoken_part(part: dict[str, Any]) -> str:
    if (url := picture_in(part)) is None:
        return text_of(part.get("text"))
    digest = blake2b(url.encode(errors="surrogatepass"), digest_size=16).hexdigest()
    return digest * (PICTURE_CHARS // len(digest))


def _text_length(content: Any) -> int:
    """Of a text, or of OpenAI's list of parts, with their pictures."""
    return len(text_of(content)) + PICTURE_CHARS * len(pictures_in(content))


def text_of(content: Any) -> str:
    """A text, or what OpenAI's list of parts says."""
    if isinstance(content, list):
        return "".join(text_of(part.get("text")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


PICTURE_CHARS = 2048
"""A picture counts as so many, where a prompt's tokens are estimated: some 500 tokens, which is what most models make
of one."""


def picture_in(part: Mapping[str, Any]) -> str | None:
    """The URL of the picture in one of OpenAI's parts: a chat's has an object around it, a response's has not."""
    found = part.get("image_url")
    url = found.get("url") if isinstance(found, dict) else found if part.get("type") == "input_image" else None
    return url if isinstance(url, str) and url else None


def pictures_in(content: Any) -> list[str]:
    """Their URLs, of a text or of OpenAI's list of parts."""
    parts = content if isinstance(content, list) else ()
    return [url for part in parts if isinstance(part, dict) and (url := picture_in(part)) is not None]


def spoken_in_response(body: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Role and text of what a body of ``/v1/responses`` says, in order, much as its chat template will have them."""
    instructions, items = body.get("instructions"), body.get("input")
    said = [("system", instructions)] if isinstance(instructions, str) else []
    if isinstance(items, str):
        return [*said, ("user", items)]
    for item in items if isinstance(items, list) else ():
        if not isinstance(item, dict):
            continue
        role = "tool" if "output" in item else str(item.get("role") or "assistant")
        parts = (item.get(name) for name in ("content", "name", "arguments", "input", "output"))
        said.append((role, "".join(map(spoken, parts))))
    return said


@dataclass(frozen=True)
class TokensUsed:
    """Between an OpenAI answer's parts: tokens since the last of these."""

    prompt: int
    completion: int


@dataclass(frozen=True)
class OpenAIHead:
    """The first thing that comes back. The body's parts, text, follow: server-sent events as they are made, or one
    whole JSON document."""

    status: int
    media_type: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)
    """Of a whole document."""

    @property
    def is_stream(self) -> bool:
        return self.media_type == "text/event-stream"


@dataclass(frozen=True)
class TokenizeRequest:
    """A prompt to tokenise. Exactly one of text and chat is set."""

    text: str | None = None
    chat: ChatPrompt | None = None
    add_special_tokens: bool | None = None
    """None: True for text, False for chat."""

    return_token_strs: bool = False


@dataclass(frozen=True)
class Tokens:
    """What a prompt is to the model."""

    token_ids: tuple[int, ...]
    max_model_len: int
    token_strs: tuple[str, ...] = ()
    """As the vocabulary spells them, when asked for."""


@dataclass(frozen=True)
class ModelInfo:
    max_model_len: int
    vocab_size: int
    dtype: str
    architecture: str
    tokenizer: str
    """Its class."""

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
    """One replica's answer to a call that all of a deployment get: value, or error when it failed or was late."""

    replica_id: str | None
    """Serve's unique id of the replica; None when it died or was late, and so never said who it is."""

    value: Any = None
    error: str | None = None

    @property
    def ok(self) -> bool:
        return self.error is None


Broadcast = Callable[..., Awaitable[list[ReplicaReply]]]
"""``outrider.actors.serve_seam.broadcast.broadcast(handle, method, *args, timeout_s=...)``. Whoever asks all replicas
gets it passed in: it leans on Serve's private names, which this side of the seam knows nothing of."""


async def sign(target: Any, replica_id: str, method: str, args: tuple[Any, ...]) -> ReplicaReply:
    """The replica's side of a broadcast: call the coroutine method of target, and put the replica's id on what comes of
    it."""
    try:
        return ReplicaReply(replica_id, value=await getattr(target, method)(*args))
    except Exception as error:
        logger.warning("%s failed on replica %s", method, replica_id, exc_info=error)
        return ReplicaReply(replica_id, error=f"{type(error).__name__}: {error}")


class RequestError(Exception):
    """A request that is refused at the door.

    field: the request field at fault, in the public API's spelling, e.g. ``sampling.temperature``.
    fix: what to send instead.
    """

    def __init__(self, field: str, problem: str, fix: str) -> None:
        super().__init__(field, problem, fix)
        self.field, self.problem, self.fix = field, problem, fix

    def __str__(self) -> str:
        return f"{self.field}: {self.problem}; {self.fix}"


class TooManyRefused(Exception):
    """A constraint that is not looked at, since too many of its caller's were refused lately. field: where it is."""

    def __init__(self, field: str, problem: str, retry_after_s: float) -> None:
        super().__init__(field, problem, retry_after_s)
        self.field, self.problem, self.retry_after_s = field, problem, retry_after_s

    def __str__(self) -> str:
        return f"{self.field}: {self.problem}"


class RequestIdInUse(Exception):
    """A request with this id is running."""

    def __init__(self, request_id: str) -> None:
        super().__init__(request_id)
        self.request_id = request_id

    def __str__(self) -> str:
        return f"request_id: {self.request_id!r} is the id of a running request; send another one, or none"


class ReplicaLost(ConnectionError):
    """A replica that can still answer cannot serve: its engine is dead. Serve will replace it."""

    def __init__(self, replica_id: str, problem: str) -> None:
        super().__init__(replica_id, problem)
        self.replica_id, self.problem = replica_id, problem

    def __str__(self) -> str:
        return f"replica {self.replica_id}: {self.problem}"


LIMITS = ("structured_outputs", "allowed_token_ids", "bad_words")
"""Sampling parameters that may forbid every token: a JSON schema that refers to itself and nothing else, say."""


class SamplingFailed(Exception):
    """The engine gave a request up because it could not choose its next token, and the request has no LIMITS that it
    may be due to. Other requests go on."""

    def __init__(self, request_id: str) -> None:
        super().__init__(request_id)
        self.request_id = request_id

    def __str__(self) -> str:
        return f"request {self.request_id}: the model's logits for the next token were not finite"


MAX_N = 64
"""Answers of one prompt."""

RANGES: dict[str, tuple[float, float, str]] = {
    "n": (1, MAX_N, f"1 to {MAX_N}, or leave it out"),
    "temperature": (0, 2, "a number from 0 (greedy) to 2"),
    # Beyond these the scaled logits leave float32, and no token can be chosen.
    "repetition_penalty": (0.01, 100, "a number from 0.01 to 100 (1 is off)"),
}
"""Sampling parameters whose least and most, and how a refusal puts them, are our own and not vLLM's."""

_MOST_OF_A_PROBLEM = 300
_MOST_NAMED = 20
_REQUEST_ID = re.compile(r"[!-~]{1,128}")


def check_request_id(request_id: str) -> None:
    """Ids travel in log lines and gRPC metadata, which carry visible ASCII only. Raises RequestError."""
    if not _REQUEST_ID.fullmatch(request_id):
        raise RequestError(
            "request_id",
            f"{shown(request_id)} is not usable as an id",
            "send 1 to 128 printable ASCII characters without spaces, or leave it out",
        )


def check_range(field: str, name: str, value: float) -> None:
    """name: of RANGES. field: what the API calls it. Raises RequestError."""
    least, most, allowed = RANGES[name]
    if not least <= value <= most:  # NaN compares false with everything, so it is refused too
        raise RequestError(field, f"{value} is out of range", f"send {allowed}")


def check_seeds(field: str, seed: int, n: int) -> None:
    """Each of n answers has a seed of its own, counted up. Raises RequestError."""
    if seed < -1 <= seed + n - 1:
        raise RequestError(
            field, f"{seed} counted up for n = {n} meets -1, which is no seed", "send a seed of 0 or more"
        )


def check_chars(field: str, chars: int, most: int) -> None:
    """Raises RequestError."""
    if chars > most:
        raise RequestError(field, f"has {chars} characters", f"send {most} at most")


def check_list(field: str, values: Any, most: int, most_chars: int | None = None) -> None:
    """values: a list of a request's, of texts where they have a most_chars. What is none is somebody else's to refuse.
    Raises RequestError."""
    if not isinstance(values, str) and len(values) > most:
        raise RequestError(field, f"{len(values)} are too many", f"send at most {most}")
    if most_chars is None:
        return
    for text in [values] if isinstance(values, str) else values:
        if isinstance(text, str) and len(text) > most_chars:
            raise RequestError(field, f"holds {len(text)} characters in one", f"send at most {most_chars} in each")


MAX_REPEATED_PATTERN = 64
"""Tokens: the longest pattern that repetition_detection looks for."""

MAX_REPEATED_TOKENS = 512
"""Of a pattern and its repetitions together. vLLM looks at each token of an answer, in the engine's step, while
everybody waits: some 0.6 ms at these two, where a pattern of 4,000 tokens takes 400."""


def check_repetition(field: str, asked: dict[str, Any]) -> None:
    """asked: repetition_detection as it was sent, for whose numbers vLLM would take texts, too. Raises RequestError."""
    for name, value in asked.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise RequestError(f"{field}.{name}", "is no whole number", "send one, or leave it out")
    size, count = (asked.get(name) or 0 for name in ("max_pattern_size", "min_count"))
    if size > MAX_REPEATED_PATTERN:
        raise RequestError(
            f"{field}.max_pattern_size", f"{size} is too long a pattern", f"send {MAX_REPEATED_PATTERN} at most"
        )
    if size * count > MAX_REPEATED_TOKENS:
        problem = f"{count} repetitions of {size} tokens are too many to look for"
        fix = f"send {MAX_REPEATED_TOKENS // size} at most, or a smaller max_pattern_size"
        raise RequestError(f"{field}.min_count", problem, fix)


def check_max_tokens(field: str, max_tokens: int, limits: LimitsConfig) -> None:
    """Raises RequestError."""
    if limits.greatest_max_tokens is not None and max_tokens > limits.greatest_max_tokens:
        raise RequestError(
            field, f"{max_tokens} is above what this deployment answers", f"send 1 to {limits.greatest_max_tokens}"
        )


def check_timeout(field: str, timeout_ms: int, limits: LimitsConfig) -> None:
    """Raises RequestError."""
    if timeout_ms > (most := int(limits.greatest_timeout_s * 1000)):
        raise RequestError(field, f"{timeout_ms} is above what this deployment waits", f"send 1 to {most} milliseconds")


def check_num_speculative_tokens(wanted: int, *, enabled: bool, most: int) -> None:
    """enabled: whether the request wants drafts at all. most: K, 0 without a drafter. Raises RequestError."""
    field = "speculation.num_speculative_tokens"
    if wanted == 0:
        raise RequestError(
            field, "0 does not switch speculation off", "send speculation.enabled = false and leave this out"
        )
    if most == 0:
        raise RequestError(field, "this deployment has no drafter", "leave it out")
    if wanted > most:
        raise RequestError(
            field, f"{wanted} is above what this deployment drafts a round", f"send 1 to {most}, or leave it out"
        )
    if not enabled:
        raise RequestError(field, "is given, but speculation.enabled is false", "leave one of the two out")


def unknown_adapter(field: str, name: str, names: Sequence[str]) -> RequestError:
    """names: of those that there are."""
    if not names:
        return RequestError(field, f"{shown(name)} is not known: there are no adapters", "leave it out")
    listed = ", ".join(map(repr, names[:_MOST_NAMED])) + (", …" if len(names) > _MOST_NAMED else "")
    return RequestError(field, f"{shown(name)} is not known here", f"send one of {listed}, or leave it out")


def check_verification_under_grammar(field: str, asked: str | None) -> None:
    """asked: by a request with structured output. field: the one that an API blames. Raises RequestError."""
    try:
        check_exact_under_grammar(asked)
    except ValueError as error:
        fix = "ask for coupled verification, or leave speculation.verification out"
        raise RequestError(field, str(error), fix) from None


def shown(text: str, limit: int = 60) -> str:
    """A client's own text, short enough for a sentence."""
    return repr(text if len(text) <= limit else text[:limit] + "…")


def shortened(text: str) -> str:
    """What somebody else's error says, on one line that a client may read."""
    text = " ".join(text.split()).rstrip(".")
    return text if len(text) <= _MOST_OF_A_PROBLEM else text[:_MOST_OF_A_PROBLEM] + "…"
