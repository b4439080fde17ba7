"""One request as rank 0 knows it, and its sampling as verification and drafter take it. Pure: vLLM is not loaded."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from outrider.actors.round.length import Estimate
from outrider.cluster.link.messages import (
    MAX_BIASED_TOKENS,
    MAX_INT31,
    MAX_TOP_N,
    DraftSampling,
    PrefetchedProposal,
    Proposals,
)
from outrider.cluster.modes import Mode, mode_for

if TYPE_CHECKING:
    from outrider.actors.observability.tracing import RoundTrace

EXTRA_ARGS_KEY = "outrider"
"""In SamplingParams.extra_args. A dict with any of

- ``num_speculative_tokens``: fewer drafts than the deployment's, 0 for none;
- ``verification``: ``rejection``, ``block`` or ``coupled``, the request's own choice;
- ``tenant``: whose memory of answers a suffix drafter may use and add to, a 63-bit number; left out: everybody's;
- ``caller``: whose request it is, a number for an API key, where requests need one (``actors/round/scheduling.py``);
- ``learn``: false: no drafter learns from it, nor remembers its answer for others;
- ``trace_headers``: W3C headers of the request's span in the target, where it is traced;
- ``timeout_s``: seconds after its arrival in the scheduler from which on that drops the request;
- ``deadline``: its form on the way through vLLM's serving classes, within one process
  (actors/serving/openai/checked_engine.py).
"""

GREEDY_BELOW = 1e-5
"""vLLM's own limit: a lower temperature is greedy."""

_LEAST_TOP_P = 1e-30
"""The kernels take float32, where less could become 0. The likeliest token alone is left long before."""


def random_seed() -> int:
    """A seed for a request that brought none. From the operating system: requests must never share one."""
    return secrets.randbits(63)


def sampling_of(params: Any, deployment: str) -> DraftSampling:
    """How a request's tokens are chosen: fixed for its life, preemptions included, and without what a drafter alone is
    told. params: vLLM's SamplingParams. deployment: the configured ``speculation.verification``.

    Raises ValueError for a choice of verification that the request's other parameters rule out.
    """
    mode = mode_for(
        greedy=params.temperature < GREEDY_BELOW,
        seeded=params.seed is not None,
        structured=params.structured_outputs is not None,
        asked=carried(params).get("verification"),
        deployment=deployment,
    )
    seed = _as_int64(params.seed) if params.seed is not None else random_seed()
    if mode is Mode.GREEDY:
        return DraftSampling(mode, seed=seed, top_n=0)
    return DraftSampling(
        mode=mode,
        temperature=params.temperature,
        top_k=min(max(params.top_k, 0), MAX_INT31),  # more than any vocabulary has
        top_p=max(params.top_p, _LEAST_TOP_P),
        min_p=params.min_p,
        seed=seed,
        top_n=0,
    )


def as_drafted(sampling: DraftSampling, params: Any, top_n: int, vocab_size: int) -> DraftSampling:
    """With what the drafter is told. params: the same as for `sampling_of`; top_n: the configured ``draft_top_n``."""
    biases, only_biased = _biases(params, vocab_size)
    return replace(
        sampling,
        top_n=top_n if sampling.mode.samples_q else 0,
        biases=biases,
        only_biased=only_biased,
        tenant=carried(params).get("tenant", 0),
        remembered=bool(carried(params).get("learn", True)),
    )


def check_for_ranks(params: Any) -> None:
    """params: vLLM's SamplingParams, at the door. Raises ValueError or KeyError for what rank 0, or the drafter's link,
    would trip over: an exception there ends the engine."""
    as_drafted(sampling_of(params, "coupled"), params, MAX_TOP_N, MAX_INT31)


@dataclass(slots=True, eq=False)
class Request:
    """Everything rank 0 knows of a request, from its first step to its last, preemptions included.

    token_ids: committed, prompt and output. max_drafts: of a round; 0: it decodes plainly, and no drafter hears of it.
    """

    request_id: str
    params: Any
    """vLLM's SamplingParams."""

    sampling: DraftSampling
    """How its tokens are chosen, and, where any are, its drafts."""

    token_ids: list[int]
    num_prompt_tokens: int
    max_drafts: int = 0

    running: bool = True
    """False from a preemption until it is resumed."""

    ended: bool = False
    """Its last token has been committed. Steps that were scheduled before that was known have nothing to do for it."""

    # What is known of the drafter's side of it; actors/round/drafter_client.py writes these.

    handle: int | None = None
    """Stands for the request on the link. Never used twice on a link, so an answer to an earlier life of the request
    (before a preemption) finds nobody. None while it is not open on any."""

    next_handle: int | None = None
    """Likewise, on the link that it moves to while another drafts for it. None: it does not move."""

    next_ready: bool = False
    """Its text has been read there: the next commit moves it."""

    ready: bool = False
    """The drafter has drafted for this handle, so a round may wait for it."""

    asked: bool = False
    """The drafter has been told of a commit and has not answered it."""

    awaited: bool = False
    """It was asked, and the round waits for the answer."""

    proposal: Proposals | None = None
    """A continuation of exactly token_ids. Kept until the next commit, whatever becomes of the link: the scheduler may
    hold its drafts, and verification needs the q they were drawn from."""

    ahead: dict[tuple[int, int], PrefetchedProposal] = field(default_factory=dict)
    """What the drafter has sent for outcomes of the round that is being verified, by position and next token."""

    teaches: bool = False
    """The drafter is told what the target thinks of its tokens (actors/round/learning_recorder.py)."""

    degraded: bool = False
    """It has decoded plainly for another reason than the length controller's choice."""

    estimate: Estimate = field(default_factory=Estimate)
    """What the length controller knows of it."""

    trace: RoundTrace | None = None
    """Where its rounds are traced."""

    @classmethod
    def of(
        cls,
        request_id: str,
        params: Any,
        token_ids: list[int],
        num_prompt_tokens: int,
        deployment: Deployment,
        adapter: str = "",
        *,
        shows_pictures: bool = False,
    ) -> Request:
        """params: vLLM's SamplingParams; token_ids: prompt and output so far; adapter: see Arrival. shows_pictures: its
        prompt's ids do not say all of it.

        Raises ValueError for a choice of verification that the request's other parameters rule out.
        """
        sampling = sampling_of(params, deployment.verification)
        most = deployment.num_speculative_tokens
        max_drafts = max(0, min(carried(params).get("num_speculative_tokens", most), most))
        if max_drafts:
            top_n = min(deployment.draft_top_n, deployment.vocab_size)
            sampling = as_drafted(sampling, params, top_n, deployment.vocab_size)
            tenant = sampling.tenant
            if (adapter or shows_pictures) and deployment.remembers_answers:
                tenant = _tenant_of(tenant, acceptance_group(adapter, shows_pictures))
            sampling = replace(sampling, tenant=tenant, adapter=deployment.draft_adapters.get(adapter, 0))
        return cls(request_id, params, sampling, token_ids, num_prompt_tokens, max_drafts)

    def is_asked_no_more(self) -> None:
        """No answer to its last commit counts any more, nor what was sent ahead."""
        self.asked = self.awaited = False
        self.ahead.clear()

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def drafts(self) -> list[int]:
        return [] if self.proposal is None else list(self.proposal.token_ids)

    def is_finished_by(self, token_ids: list[int], max_model_len: int) -> bool:
        """Whether the scheduler will end it on what was just committed, as far as a worker can tell."""
        params = self.params
        ends = set(params.stop_token_ids or ()) if params.ignore_eos else params.all_stop_token_ids
        return (
            len(self.token_ids) - self.num_prompt_tokens >= (params.max_tokens or 1 << 62)
            or len(self.token_ids) >= max_model_len
            or not ends.isdisjoint(token_ids)
        )


@dataclass(frozen=True, slots=True)
class Deployment:
    """What all requests of a deployment have in common. num_speculative_tokens: 0 without a drafter.
    remembers_answers: the drafter drafts from other requests' answers; a draft model keeps prompts, which are the same
    to it whatever adapter the target has. draft_adapters: those that it has adapters of its own for, and their numbers.
    """

    verification: str
    num_speculative_tokens: int
    draft_top_n: int
    vocab_size: int
    max_model_len: int
    remembers_answers: bool = False
    draft_adapters: Mapping[str, int] = field(default_factory=dict)


def carried(params: Any) -> dict[str, Any]:
    """What our request brought through vLLM. params: vLLM's SamplingParams."""
    ours: dict[str, Any] = (params.extra_args or {}).get(EXTRA_ARGS_KEY, {})
    return ours


def acceptance_group(adapter: str, shows_pictures: bool) -> str:
    """Requests by what their answers and their drafts' acceptance depend on beside the text: an adapter, in whose name
    there are no spaces, and pictures, of which the drafter sees none and the same text may go on in many ways."""
    return f"{adapter} with pictures" if shows_pictures else adapter


def _tenant_of(tenant: int, adapter: str) -> int:
    """Whose memory of answers a tenant's requests with an adapter use and add to: nobody else's, nor its others'."""
    digest = blake2b(tenant.to_bytes(8, "little") + adapter.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _as_int64(seed: int) -> int:
    """vLLM counts seeds up for n > 1, past the end of 64 bits too."""
    return (seed + 2**63) % 2**64 - 2**63


def _biases(params: Any, vocab_size: int) -> tuple[tuple[tuple[int, float], ...], bool]:
    """logit_bias, allowed_token_ids and bad words of one token, as far as a message has room for them. What the
    drafter is not told costs acceptance only."""
    biases: dict[int, float] = {}
    only_biased = bool(params.allowed_token_ids) and len(params.allowed_token_ids) <= MAX_BIASED_TOKENS
    if only_biased:
        biases = dict.fromkeys(params.allowed_token_ids, 0.0)
    for token, bias in (params.logit_bias or {}).items():
        if not only_biased or token in biases:
            biases[token] = bias
    for word in params.bad_words_token_ids or ():
        # A tokenizer may know ids that the model has no logits for.
        if len(word) == 1 and word[0] < vocab_size and (not only_biased or word[0] in biases):
            biases[word[0]] = -math.inf
    if only_biased and all(bias == -math.inf for bias in biases.values()):
        return (), False  # nothing can be chosen: the verifier will say so
    return tuple(biases.items())[:MAX_BIASED_TOKENS], only_biased
