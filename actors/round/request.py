"""What our requests carry through vLLM to the scheduler and the ranks.

One request's sampling as verification and drafter take it, from vLLM's parameters. Pure: vLLM is not loaded here.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from outrider.cluster.link.messages import MAX_BIASED_TOKENS, DraftSampling
from outrider.cluster.modes import Mode, mode_for

EXTRA_ARGS_KEY = "outrider"
"""In SamplingParams.extra_args. A dict with any of

- ``num_speculative_tokens``: fewer drafts than the deployment's, 0 for none;
- ``verification``: ``rejection``, ``block`` or ``coupled``, the request's own choice;
- ``trace_headers``: W3C headers of the request's span in the target, where it is traced;
- ``timeout_s``: seconds after its arrival in the scheduler from which on that drops the request;
- ``deadline``: its form on the way through vLLM's serving classes, within one process
  (actors/serving/openai/engine.py).
"""


_GREEDY_BELOW = 1e-5
"""vLLM's own limit: a lower temperature is greedy."""

_LEAST_TOP_P = 1e-30
"""The kernels take float32, where less could become 0. The likeliest token alone is left long before."""


def random_seed() -> int:
    """A seed for a request that brought none. From the operating system: requests must never share one."""
    return secrets.randbits(63)


@dataclass(frozen=True, slots=True)
class RequestSampling:
    """Fixed for a request's life, preemptions included.

    seed: the client's or a random one; top_k: 0 for none.
    """

    mode: Mode
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int

    @classmethod
    def of(cls, params: Any, deployment: str, make_seed: Callable[[], int] = random_seed) -> RequestSampling:
        """params: vLLM's SamplingParams. deployment: the configured ``speculation.verification``.

        Raises ValueError for a choice of verification that the request's other parameters rule out.
        """
        ours = (params.extra_args or {}).get(EXTRA_ARGS_KEY, {})
        mode = mode_for(
            greedy=params.temperature < _GREEDY_BELOW,
            seeded=params.seed is not None,
            structured=params.structured_outputs is not None,
            asked=ours.get("verification"),
            deployment=deployment,
        )
        greedy = mode is Mode.GREEDY
        return cls(
            mode=mode,
            temperature=0.0 if greedy else params.temperature,
            top_k=0 if greedy else max(params.top_k, 0),
            top_p=1.0 if greedy else max(params.top_p, _LEAST_TOP_P),
            min_p=0.0 if greedy else params.min_p,
            seed=_as_int64(params.seed) if params.seed is not None else make_seed(),
        )

    def drafting(self, params: Any, top_n: int, vocab_size: int) -> DraftSampling:
        """What the drafter is told. params: the same as for `of`; top_n: the configured ``draft_top_n``."""
        biases, only_biased = _biases(params, vocab_size)
        return DraftSampling(
            mode=self.mode,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            top_n=top_n if self.mode.samples_q else 0,
            biases=biases,
            only_biased=only_biased,
        )


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
