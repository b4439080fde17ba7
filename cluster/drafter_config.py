"""The ``drafter`` section: one class a method in a drafter actor; ``CoLocatedConfig`` for what runs inside the target's
engine. ``placement`` says where; ``method`` how. Keys are those of vLLM's ``speculative_config`` wherever it has one.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from outrider.cluster.co_located_config import (
    CO_LOCATED_METHODS,
    GPU_ONLY_METHODS,
    MTP_ALIAS,
    REFUSED_METHODS,
    CoLocatedConfig,
)
from outrider.cluster.config_section import ConfigError, CoreSet, EngineConfig, NodeLabels, Section
from outrider.cluster.engine_args import Side
from outrider.cluster.learning_config import LearningConfig
from outrider.cluster.lora_config import DraftLoraConfig
from outrider.cluster.scaling_config import PoolScalingConfig

REMOTE_METHODS = ("draft_model", "ngram", "suffix")
"""In a drafter actor: what needs tokens only."""

WITH_TARGET = "with_target"


def placement_of(section: Mapping[str, Any]) -> Any:
    """What a section says of its ``placement``, by today's name."""
    placement = section.get("placement", WITH_TARGET)
    return WITH_TARGET if placement == "remote" else placement


class ActorConfig(Section):
    """A drafter in an actor of its own."""

    placement: Literal["with_target", "pool"] = "with_target"
    """``with_target``: a drafter for each target replica, beside it. ``pool``: ``num_drafters`` for all of them, each
    on bundles of its own; target replicas serve without, too. (``remote`` is an older name of ``with_target``.)"""

    num_drafters: int = Field(1, ge=1, le=1024)
    """``placement: pool``: how many. One for four targets, see ``targets_per_drafter`` under «drafter.autoscaling»."""

    autoscaling: PoolScalingConfig | None = None
    """``placement: pool``: a number of drafters that follows what they gain, in place of ``num_drafters``; keys below,
    under «drafter.autoscaling»."""

    node_labels: NodeLabels = Field(default_factory=dict)
    """Labels that a node has to carry, with the value of each, to be given a drafter, e.g. ``{zone: a}``. Where the
    target's say otherwise, the two are on different nodes."""

    @property
    def pooled(self) -> bool:
        return self.placement == "pool"

    @property
    def remembers_answers(self) -> bool:
        """It drafts from other requests' answers."""
        return False

    @property
    def least_drafters(self) -> int:
        """Of a pool: that there are from the start."""
        return self.num_drafters if self.autoscaling is None else self.autoscaling.min

    @property
    def most_drafters(self) -> int:
        return self.num_drafters if self.autoscaling is None else self.autoscaling.max

    @model_validator(mode="before")
    @classmethod
    def _name_of_the_placement(cls, data: Any) -> Any:
        return {**data, "placement": placement_of(data)} if isinstance(data, dict) and "placement" in data else data

    @model_validator(mode="after")
    def _num_drafters_of_a_pool(self) -> ActorConfig:
        if self.num_drafters > 1 and not self.pooled:
            raise ValueError(
                f"num_drafters ({self.num_drafters}): only with placement: pool; each target replica has one of its own"
            )
        if self.autoscaling is not None and not self.pooled:
            raise ValueError("autoscaling: only with placement: pool; serving.autoscaling is for targets")
        if self.autoscaling is not None and self.num_drafters > 1:
            raise ValueError("num_drafters: is given beside autoscaling, which decides it; leave it out")
        return self


MIN_DRAFT_STEP_TOKENS = 64
"""Lower limit of a drafter's ``max_num_batched_tokens``: tokens to catch up with."""


class DraftEngineConfig(EngineConfig):
    """A draft model's engine: vLLM's, its steps and its KV blocks the drafter's own."""

    side: ClassVar[Side] = "drafter"

    prefill_chunk_tokens: int = Field(128, ge=1)
    """Prompt tokens the drafter runs between two rounds: bounds how long a prefill delays a proposal. Left out on GPU:
    1024."""

    draft_vocab_size: int | None = Field(None, ge=0)
    """Tokens that the drafter's output head is cut to, which makes a draft step cheaper: at first those that `outrider
    distill` has trained it on, then the lowest ids; later those that prompts hold and answers use. Exact all the same.
    0: all of them. None: as many as it was trained on where it was not on all, else 32768 where the vocabulary is at
    least twice as large, else all; with several ranks all. Left out on GPU: 0, until it has been measured there."""

    max_draft_rows: int = Field(128, ge=1, le=4096)
    """Most rows in one step of the drafter: sequences that are drafted for, and their side branches."""

    block_size: int | None = Field(None, ge=1)
    """Tokens in a KV block. A side branch copies one, so small blocks branch quickly. None on CPU: 32; on GPU: vLLM's
    own."""

    @property
    def own_lora(self) -> DraftLoraConfig | None:
        """Adapters of the model's own."""
        return None

    @model_validator(mode="after")
    def _steps_fit(self) -> DraftEngineConfig:
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


class AlsoConfig(DraftEngineConfig):
    """Another draft model in the same drafter, with an engine and a KV cache of its own
    ([methods.md](methods.md#several-drafters))."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_-]{0,31}$")
    """By which metrics tell it apart."""

    @model_validator(mode="after")
    def _shares_a_process(self) -> AlsoConfig:
        if self.name in REMOTE_METHODS:
            raise ValueError(f"name: {self.name!r} is a method, and what metrics call it; give another name")
        if self.tensor_parallel_size > 1:
            raise ValueError(
                f"tensor_parallel_size ({self.tensor_parallel_size}): several draft models share one process; set 1"
            )
        if self.cores is not None:
            raise ValueError("cores: the models of a drafter share its cores; write drafter.cores")
        return self


class DraftModelConfig(ActorConfig, DraftEngineConfig):
    """A smaller model with the same tokenizer, in its own engine with its own KV cache. Vocabularies may be padded to
    different sizes."""

    method: Literal["draft_model"]
    """``draft_model``."""

    beside: list[Literal["ngram", "suffix"]] = Field(default_factory=list)
    """Look-ups that draft too, by their methods' defaults: each round's drafts are those of the model or of a look-up,
    whichever earns most by what has been accepted ([methods.md](methods.md#several-drafters))."""

    also: list[AlsoConfig] = Field(default_factory=list, max_length=2)
    """Other draft models, in the same process: each request is drafted for by the one that earns most; keys below,
    under «drafter.also» ([methods.md](methods.md#several-drafters))."""

    learn: LearningConfig | None = None
    """Train it on the answers it drafts for, while it serves; keys below, under «drafter.learn». None: it stays as it
    is."""
    lora: DraftLoraConfig | None = None
    """A mapping: LoRA adapters of the draft model's own, for requests with some of the target's ([lora.md](lora.md)).
    None: it drafts for all alike."""

    @property
    def own_lora(self) -> DraftLoraConfig | None:
        return self.lora

    @property
    def models(self) -> dict[str, DraftEngineConfig]:
        """All draft models, by the names of their sections: this one is the first."""
        return {"drafter": self, **{f"drafter.also.{each.name}": each for each in self.also}}

    @property
    def remembers_answers(self) -> bool:
        return "suffix" in self.beside

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
        if len(set(self.beside)) < len(self.beside):
            raise ValueError(f"beside: {', '.join(self.beside)}: names a look-up twice; give each once")
        if self.learn is not None and self.lora is not None:
            raise ValueError(
                "learn: a drafter with adapters of its own (lora) is not trained; leave one of the two out"
            )
        if self.learn is not None and self.quantization is not None:
            raise ValueError(
                f"learn: weights quantised as {self.quantization} cannot be trained; give the drafter unquantised, or "
                "leave learn out"
            )
        return self

    @model_validator(mode="after")
    def _go_together(self) -> DraftModelConfig:
        if not self.also:
            return self
        names = [each.name for each in self.also]
        if len(set(names)) < len(names):
            raise ValueError(f"also: {', '.join(names)}: two models have one name; give each its own")
        if self.tensor_parallel_size > 1:
            raise ValueError(
                f"tensor_parallel_size ({self.tensor_parallel_size}): draft models of several ranks stand alone; set "
                "1, or leave also out"
            )
        if self.lora is not None:
            raise ValueError(
                "lora: the models in also would draft for requests with adapters as if they had none; leave one of the "
                "two out"
            )
        return self


class LookupConfig(ActorConfig):
    """A drafter that only searches text: one process, no model, no GPU."""

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
    """Prompt lookup, no model: propose what followed the last occurrence of the current n-gram."""

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
    """Suffix decoding, no model: propose what followed the longest matching ends of the text, in the request itself and
    in the answers that all replicas gave lately. Keys that begin with ``suffix_decoding`` are vLLM's, by name and
    meaning, but for the one that is marked as ours."""

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

    @property
    def remembers_answers(self) -> bool:
        return True


RemoteConfig = DraftModelConfig | NgramConfig | SuffixConfig
"""A drafter in an actor of its own."""


def _tag(value: Any) -> str | None:
    """Which class a section belongs to. None, for a section without a usable method, is the error of the union."""
    names = ("placement", "method")
    section = value if isinstance(value, dict) else {name: getattr(value, name, None) for name in names}
    if placement_of(section) == "co_located":
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

TAGS = (*REMOTE_METHODS, "co_located", "gateway_on", "gateway_off")


def refusal_of(section: dict[str, Any]) -> str | None:
    """What is wrong with a section's ``placement`` or ``method``, as ``field: problem; fix``. None: nothing."""
    placement, method = placement_of(section), section.get("method")
    if placement not in (WITH_TARGET, "pool", "co_located"):
        return (
            "placement: must be 'with_target' (a drafter actor beside each target), 'pool' (drafter actors that all "
            f"targets share) or 'co_located' (inside the target's engine) (found {placement!r})"
        )
    if method is None:
        return "method: required, but missing"
    if not isinstance(method, str):
        return f"method: must be a name, such as draft_model (found {method!r})"
    if method.endswith(MTP_ALIAS):
        return f"method: vLLM has replaced this name; write method: mtp (found {method!r})"
    if method in REFUSED_METHODS:
        return f"method: {REFUSED_METHODS[method]} (found {method!r})"
    if method in CO_LOCATED_METHODS and method not in REMOTE_METHODS and placement != "co_located":
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


def check_several_models(drafter: DraftModelConfig, gpu: bool) -> None:
    """Raise ConfigError where draft models would share a GPU, each with as much of its memory as if it were alone."""
    if not gpu or not drafter.also:
        return
    for section, engine in drafter.models.items():
        if engine.kv_cache_memory_bytes is None:
            raise ConfigError(
                f"{section}.kv_cache_memory_bytes: required on a GPU that several draft models share: without it each "
                "takes what gpu_memory_utilization leaves; set it for every one of them"
            )
    shares = sum(engine.gpu_memory_utilization for engine in drafter.models.values())
    if shares > 1.0:
        raise ConfigError(
            f"drafter.gpu_memory_utilization: {shares:.2f} over all models of drafter and drafter.also, which share a "
            "GPU: a model is not loaded unless so much is free; set shares whose sum is 1 at most"
        )


def check_build_drafts(drafter: CoLocatedConfig, gpu: bool) -> None:
    """Raise ConfigError for co-located drafting that the installed vLLM does not have, or would ignore in silence.

    gpu: whether it is vLLM's GPU build.
    """
    if drafter.method == "suffix" and find_spec("arctic_inference") is None:
        raise ConfigError(
            "drafter.method: vLLM's own suffix drafting needs the package arctic-inference (a source build), which is "
            "not installed; install it, or leave placement out: Outrider's suffix drafter needs no package"
        )
    if gpu:
        return
    if drafter.method in GPU_ONLY_METHODS:
        raise ConfigError(f"drafter.method: {drafter.method} does not run on CPU: {GPU_ONLY_METHODS[drafter.method]}")
    if drafter.rejection_sample_method == "block":
        raise ConfigError(
            "drafter.rejection_sample_method: block is a matter of vLLM's V2 model runner; on CPU it would be ignored; "
            "leave it out, or use placement: with_target with speculation.verification: block"
        )
