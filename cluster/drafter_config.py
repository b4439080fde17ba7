"""The ``drafter`` section: one class a method in a drafter actor, and one for what runs inside the target's engine.

``placement`` says where; ``method`` how. Keys are those of vLLM's ``speculative_config`` wherever it has one.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from cluster.co_located_config import CoLocatedConfig
from cluster.config_section import CoreSet, EngineConfig, Section
from cluster.method_names import CO_LOCATED_METHODS, REFUSED_METHODS, REMOTE_METHODS

MIN_DRAFT_STEP_TOKENS = 64
"""Lower limit of a drafter's ``max_num_batched_tokens``: tokens to catch up with, and guesses."""


class DraftModelConfig(EngineConfig):
    """A smaller language model with the target's vocabulary, in its own engine with its own KV cache."""

    method: Literal["draft_model"]
    """``draft_model``."""

    placement: Literal["remote"] = "remote"
    """``remote``: in a drafter actor of its own."""

    prefill_chunk_tokens: int = Field(128, ge=1)
    """Prompt tokens the drafter runs between two rounds: bounds how long a prefill delays a proposal."""

    draft_vocab_size: int | None = Field(None, ge=0)
    """Tokens that the drafter's output head is cut to, which makes a draft step cheaper: the lowest ids at first, then
    those that prompts hold and answers use. Exact all the same. 0: all of them. None: 32768 where the vocabulary is at
    least twice as large and the drafter has one rank, else all."""

    prompt_lookup_min: int = Field(3, ge=1)
    """Shortest n-gram of the text whose continuation is taken for a guess of the next drafts: the model then checks
    several in one step."""

    prompt_lookup_max: int = Field(5, ge=0)
    """Longest such n-gram; 0: no guesses."""

    max_draft_rows: int = Field(128, ge=1, le=4096)
    """Most rows in one step of the drafter: sequences that are drafted for, and their side branches."""

    block_size: int | None = Field(None, ge=1)
    """Tokens in a KV block. A side branch copies one, so small blocks branch quickly. None on CPU: 32; on GPU: vLLM's
    own."""

    @model_validator(mode="before")
    @classmethod
    def _vllm_name_of_the_ranks(cls, data: Any) -> Any:
        """``draft_tensor_parallel_size`` is vLLM's name for this section's ``tensor_parallel_size``."""
        if not isinstance(data, dict) or "draft_tensor_parallel_size" not in data:
            return data
        rest = dict(data)
        size = rest.pop("draft_tensor_parallel_size")
        if size is None:
            return rest
        if rest.get("tensor_parallel_size", size) != size:
            raise ValueError(
                f"draft_tensor_parallel_size ({size}) and tensor_parallel_size ({rest['tensor_parallel_size']}) are "
                "two names for the drafter's ranks and disagree; give one of them"
            )
        return {**rest, "tensor_parallel_size": size}

    @model_validator(mode="after")
    def _can_work(self) -> DraftModelConfig:
        if self.prompt_lookup_max and self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min ({self.prompt_lookup_min}) is above prompt_lookup_max "
                f"({self.prompt_lookup_max}); swap or equal them, or set prompt_lookup_max: 0 for no guesses"
            )
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < MIN_DRAFT_STEP_TOKENS:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be {MIN_DRAFT_STEP_TOKENS} at least: one "
                "sequence may feed so many in a draft step"
            )
        if self.draft_vocab_size and self.tensor_parallel_size > 1:
            raise ValueError(
                f"draft_vocab_size ({self.draft_vocab_size}) needs the output head on one rank, the drafter has "
                f"{self.tensor_parallel_size}; leave it out, or set tensor_parallel_size: 1"
            )
        return self


class LookupConfig(Section):
    """A drafter that only searches text: one process, no model, no GPU."""

    placement: Literal["remote"] = "remote"
    """``remote``: in a drafter actor of its own."""

    cores: list[CoreSet] | None = None
    """CPU only: the one set of cores of this drafter. None: shared out at start-up."""

    @property
    def tensor_parallel_size(self) -> int:
        return 1

    @model_validator(mode="after")
    def _one_process(self) -> LookupConfig:
        if self.cores is not None and len(self.cores) != 1:
            raise ValueError(f"a drafter of method {self.method} is one process: give one set of cores")  # type: ignore[attr-defined]
        return self


class NgramConfig(LookupConfig):
    """Prompt lookup: propose what followed the last occurrence of the current n-gram."""

    method: Literal["ngram"]
    """``ngram``."""

    prompt_lookup_min: int = Field(2, ge=1)
    """Shortest n-gram that counts as a match."""

    prompt_lookup_max: int = Field(4, ge=1)
    """Longest n-gram looked for; longer matches win."""

    @model_validator(mode="after")
    def _range(self) -> NgramConfig:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min ({self.prompt_lookup_min}) is above prompt_lookup_max "
                f"({self.prompt_lookup_max}); swap or equal them"
            )
        return self


class SuffixConfig(LookupConfig):
    """Suffix decoding: propose what followed the longest matching ends of the text, in the request itself and in the
    answers that all replicas gave lately. The first four keys are vLLM's, by name and meaning."""

    method: Literal["suffix"]
    """``suffix``."""

    suffix_decoding_max_tree_depth: int = Field(24, ge=2, le=256)
    """Most tokens of match and draft together."""

    suffix_decoding_max_cached_requests: int = Field(10000, ge=0)
    """Answers that are remembered for other requests, first in, first out; 0: none, each request has its own text
    only."""

    suffix_decoding_max_spec_factor: float = Field(1.0, ge=0, allow_inf_nan=False)
    """Tokens drafted at most for each token that matches."""

    suffix_decoding_min_token_prob: float = Field(0.1, ge=0, le=1, allow_inf_nan=False)
    """Drafting stops where the estimated probability of the draft so far falls below this. Estimated from how often
    the matches went on that way."""

    suffix_decoding_max_cached_tokens: int = Field(2_000_000, ge=1024, le=100_000_000)
    """Ours: tokens of answers that are remembered at most, 28 bytes each, whatever the number of answers."""

    share_across_replicas: bool = True
    """Ours: drafters of all replicas learn each other's answers, within a second or two."""


RemoteConfig = DraftModelConfig | NgramConfig | SuffixConfig
"""A drafter in an actor of its own."""


def _tag(value: Any) -> str | None:
    """Which class a section belongs to. None, for a section without a usable method, is the error of the union."""
    section = (
        value if isinstance(value, dict) else {name: getattr(value, name, None) for name in ("placement", "method")}
    )
    if section.get("placement", "remote") == "co_located":
        return "co_located"
    method = section.get("method")
    return method if method in REMOTE_METHODS else None


DrafterConfig = Annotated[
    Annotated[DraftModelConfig, Tag("draft_model")]
    | Annotated[NgramConfig, Tag("ngram")]
    | Annotated[SuffixConfig, Tag("suffix")]
    | Annotated[CoLocatedConfig, Tag("co_located")],
    Discriminator(_tag),
]

TAGS = (*REMOTE_METHODS, "co_located")


def refusal_of(section: dict[str, Any]) -> str | None:
    """What is wrong with a section's ``placement`` or ``method``, as ``field: problem; fix``. None: nothing."""
    placement, method = section.get("placement", "remote"), section.get("method")
    if placement not in ("remote", "co_located"):
        return (
            f"placement: must be 'remote' (a drafter actor) or 'co_located' (inside the target's engine) "
            f"(found {placement!r})"
        )
    if method is None:
        return "method: required, but missing"
    if not isinstance(method, str):
        return f"method: must be a name, such as draft_model (found {method!r})"
    if method in REFUSED_METHODS:
        return f"method: {REFUSED_METHODS[method]} (found {method!r})"
    if method in CO_LOCATED_METHODS and method not in REMOTE_METHODS and placement == "remote":
        return (
            f"method: {method} needs the target's hidden states or weights, which a drafter actor does not have; "
            f"set placement: co_located (found {method!r})"
        )
    if method not in (CO_LOCATED_METHODS if placement == "co_located" else REMOTE_METHODS):
        return (
            f"method: unknown; a drafter actor takes {', '.join(REMOTE_METHODS)}, placement: co_located takes "
            f"{', '.join(CO_LOCATED_METHODS)} (found {method!r})"
        )
    return None
