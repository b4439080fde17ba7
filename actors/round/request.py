"""Holds one request as the Verifier knows it, and converts its sampling for verification and drafter.

vLLM is not loaded here.
"""

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
    DraftPath,
    DraftSampling,
    PrefetchedProposal,
    Proposals,
    SparseQ,
)
from outrider.cluster.modes import Mode, mode_for

if TYPE_CHECKING:
    from outrider.actors.observability.tracing import RoundTrace

EXTRA_ARGS_KEY = "outrider"
"""Names our entry in SamplingParams.extra_args, a dict with any of

- ``num_speculative_tokens``: fewer drafts than the deployment's, 0 for none;
- ``verification``: ``rejection``, ``block`` or ``coupled``, the request's own choice;
- ``tenant``: the memory of answers that a suffix drafter may use and add to, a 63-bit number; default: shared;
- ``caller``: a number for the request's API key, where requests need one (``actors/round/scheduling.py``);
- ``trace_headers``: W3C headers of the request's span in the target, if it is traced;
- ``timeout_s``: seconds after its arrival in the scheduler, which then drops the request;
- ``deadline``: the same on the way through vLLM's serving classes, within one process
  (actors/serving/openai/engine.py).
"""

PLACEHOLDER_TOKEN_ID = -1
"""Stands in place of a draft's id that is not known yet or cannot be used: verification ends the drafts there."""

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy, as in vLLM."""

_LEAST_TOP_P = 1e-30
"""The least top_p for the kernels: a lower one could become 0 in float32, and leaves one token all the same."""


def random_seed() -> int:
    """Returns a seed for a request without one, from the operating system: requests must never share one."""
    return secrets.randbits(63)


def sampling_of(params: Any, deployment: str) -> DraftSampling:
    """Returns how a request's tokens are chosen, fixed for its life, preemptions included.

    Args:
        params: vLLM's SamplingParams.
        deployment: the configured ``speculation.verification``.

    Raises:
        ValueError: the request's other parameters rule out its choice of verification.
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
    """Returns `sampling` with what only the drafter needs to know.

    Args:
        params: the same as for `sampling_of`.
        top_n: the configured ``draft_top_n``.
    """
    biases, only_biased = _biases(params, vocab_size)
    return replace(
        sampling,
        top_n=top_n if sampling.mode.samples_q else 0,
        biases=biases,
        only_biased=only_biased,
        tenant=carried(params).get("tenant", 0),
    )


def check_for_ranks(params: Any) -> None:
    """Raises ValueError or KeyError for parameters that the Verifier or the link cannot take.

    An exception there would end the engine. params: vLLM's SamplingParams.
    """
    as_drafted(sampling_of(params, "coupled"), params, MAX_TOP_N, MAX_INT31)


@dataclass(slots=True)
class Draft:
    """The draft tokens of one request in one step, and the distribution they were drawn from."""

    ids: list[int] = field(default_factory=list)
    q: SparseQ | None = None
    """At least as many rows as ids. None: the tokens were not drawn from a distribution."""

    paths: tuple[DraftPath, ...] = ()
    """Further paths of the draft tree, each with all its tokens."""


@dataclass(slots=True, eq=False)
class Request:
    """Holds everything the Verifier knows of a request, from its first step to its last, preemptions included.

    token_ids: committed, prompt and output. max_drafts: in one round; with 0 it decodes plainly, and no drafter hears
    of it. num_paths: of its draft tree, that one step may verify; 1 for a chain.
    """

    request_id: str
    params: Any
    """vLLM's SamplingParams."""

    sampling: DraftSampling
    """How its tokens and its drafts are chosen."""

    token_ids: list[int]
    num_prompt_tokens: int
    max_drafts: int = 0
    num_paths: int = 1

    running: bool = True
    """False from a preemption until it is resumed."""

    ended: bool = False
    """Its last token has been committed. Steps scheduled before that was known have nothing to do for it."""

    # The drafter's side of it, written by DrafterClient.

    handle: int | None = None
    """Names the request on the link; None while it is not open. A handle is never used twice, so that an answer from
    before a preemption finds no request."""

    ready: bool = False
    """The drafter has read its text, so a round may wait for an answer."""

    asked: bool = False
    """The drafter has not answered its last commit yet."""

    awaited: bool = False
    """The round waits for the answer to its last commit."""

    proposal: Proposals | None = None
    """A continuation of exactly token_ids. It is kept until the next commit, whatever becomes of the link, because the
    scheduler may hold its drafts, and verification needs the q they were drawn from."""

    prefetched: dict[tuple[int, int], PrefetchedProposal] = field(default_factory=dict)
    """Prefetched proposals for outcomes of the round that is being verified, by position and next token."""

    teaches: bool = False
    """Training samples are taken of it (actors/round/learning_recorder.py)."""

    degraded: bool = False
    """It has decoded plainly for a reason other than the length controller's choice."""

    estimate: Estimate = field(default_factory=Estimate)
    """The length controller's record of it."""

    trace: RoundTrace | None = None
    """Set where its rounds are traced."""

    @classmethod
    def of(
        cls,
        request_id: str,
        params: Any,
        token_ids: list[int],
        deployment: Deployment,
        adapter: str = "",
        *,
        shows_pictures: bool = False,
    ) -> Request:
        """Makes a request of what vLLM says of it.

        Args:
            params: vLLM's SamplingParams.
            token_ids: of its prompt.
            adapter: see Arrival.
            shows_pictures: its prompt has pictures beside the ids.

        Raises:
            ValueError: the request's other parameters rule out its choice of verification.
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
        request = cls(request_id, params, sampling, token_ids, len(token_ids), max_drafts)
        request.num_paths = deployment.num_paths if max_drafts and request.why_chain is None else 1
        return request

    def detach(self) -> None:
        """Forgets the handle: no answer to a commit counts any more, nor any prefetched proposal."""
        self.handle, self.ready = None, False
        self.asked = self.awaited = False
        self.prefetched.clear()

    @property
    def why_chain(self) -> str | None:
        """Returns why its draft tree has one path, however many are configured; None: it may have more."""
        if self.params.structured_outputs is not None:
            return "structured_output"  # whose masks are made for one chain of drafts
        return "verification" if self.sampling.mode.samples_q else None  # rejection needs the drafts of one chain

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def draft(self, most: int) -> Draft:
        """Returns the first `most` tokens of the proposal with their q, and of its further paths."""
        if self.proposal is None:
            return Draft()
        ids = list(self.proposal.token_ids[:most])
        paths, seen = [], {tuple(ids)}
        for path in self.proposal.paths if most else ():
            cut = tuple(path.token_ids[:most])
            if cut not in seen:  # what differs further on only would be verified twice
                seen.add(cut)
                paths.append(DraftPath(cut, path.gain * (len(cut) / len(path.token_ids))))
        return Draft(ids, self.proposal.q, tuple(paths))

    def is_finished_by(self, token_ids: list[int], max_model_len: int) -> bool:
        """Returns whether the scheduler will end it on what was just committed, as far as a worker can tell."""
        params = self.params
        ends = set(params.stop_token_ids or ()) if params.ignore_eos else params.all_stop_token_ids
        return (
            len(self.token_ids) - self.num_prompt_tokens >= (params.max_tokens or 1 << 62)
            or len(self.token_ids) >= max_model_len
            or not ends.isdisjoint(token_ids)
        )


@dataclass(frozen=True, slots=True)
class Deployment:
    """Holds what all requests of a deployment have in common.

    num_speculative_tokens: 0 without a drafter. num_paths: as configured. remembers_answers: the drafter drafts from
    other requests' answers. draft_adapters: the drafter's own numbers for the target's adapters, where it has any.
    """

    verification: str
    num_speculative_tokens: int
    draft_top_n: int
    vocab_size: int
    max_model_len: int
    num_paths: int = 1
    remembers_answers: bool = False
    draft_adapters: Mapping[str, int] = field(default_factory=dict)


def carried(params: Any) -> dict[str, Any]:
    """Returns the entries of EXTRA_ARGS_KEY in vLLM's SamplingParams."""
    ours: dict[str, Any] = (params.extra_args or {}).get(EXTRA_ARGS_KEY, {})
    return ours


def acceptance_group(adapter: str, shows_pictures: bool) -> str:
    """Returns a name for the requests with similar acceptance: those of an adapter, with or without pictures.

    Adapters' names contain no spaces. The drafter sees no pictures, so the same text may go on in many ways.
    """
    return f"{adapter} with pictures" if shows_pictures else adapter


def _tenant_of(tenant: int, adapter: str) -> int:
    """Returns the tenant number for the memory of a tenant's answers with an adapter."""
    digest = blake2b(tenant.to_bytes(8, "little") + adapter.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _as_int64(seed: int) -> int:
    """Wraps a seed to int64: vLLM counts seeds up for n > 1, beyond 64 bits too."""
    return (seed + 2**63) % 2**64 - 2**63


def _biases(params: Any, vocab_size: int) -> tuple[tuple[tuple[int, float], ...], bool]:
    """Returns logit_bias, allowed_token_ids and bad words of one token, and whether only biased tokens are allowed.

    A message has room for MAX_BIASED_TOKENS. What the drafter is not told costs acceptance only.
    """
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
