"""One typed configuration for a deployment: ``target``, ``drafter``, ``speculation``, ``link``, ``serving``.

Keys are vLLM's wherever vLLM has one. Unknown keys are errors. Everything that can be known to be wrong
without loading a model is rejected here, by field name, before anything starts.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

MAX_SPECULATIVE_TOKENS = 32
"""Upper limit of ``num_speculative_tokens``: sizes the link's frames and the verifier's rows."""

MIN_DRAFT_STEP_TOKENS = 64
"""Lower limit of a drafter's ``max_num_batched_tokens``: tokens to catch up with, and guesses."""

MAX_DRAFT_TOP_N = 128
"""Upper limit of ``draft_top_n``: sizes the link's frames and what a GPU program holds of q. 64 loses nothing."""

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
CoreSet = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


class ConfigError(ValueError):
    """A configuration that cannot work. The message names the field and the fix."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), use_attribute_docstrings=True)


class EngineConfig(_Section):
    """What the target's and a model drafter's engine have in common. Every key is vLLM's."""

    model: str = Field(min_length=1)
    """Checkpoint directory or hub id."""

    tensor_parallel_size: int = Field(1, ge=1)
    """Ranks the model is sharded over, one bundle (GPU, or set of cores) each."""

    dtype: Dtype = "auto"
    """Of weights and activations; float32 makes greedy answers reproducible to the token."""

    max_model_len: int | None = Field(None, ge=2)
    """Longest sequence in tokens, prompt and answer together. None: the checkpoint's own."""

    max_num_seqs: int = Field(16, ge=1, le=1024)
    """Most requests in one step."""

    max_num_batched_tokens: int | None = Field(None, ge=1)
    """Most tokens in one step; longer prefills are chunked."""

    kv_cache_memory_bytes: int | None = Field(None, ge=1)
    """KV cache a rank, in bytes. None on CPU: 512 MiB; on GPU: what gpu_memory_utilization leaves."""

    gpu_memory_utilization: float = Field(0.9, gt=0.0, le=1.0)
    """Share of a GPU's memory the engine may take. GPU only."""

    enable_prefix_caching: bool = True
    """Keep KV blocks of finished requests for prompts that start the same."""

    enforce_eager: bool | None = None
    """None: eager on CPU (compiling costs minutes for a few per cent), CUDA graphs on GPU."""

    seed: int = 0
    """Of the engine's own random numbers; requests have seeds of their own."""

    trust_remote_code: bool = False
    """Run code that comes with the checkpoint."""

    revision: str | None = None
    """Branch, tag or commit of a hub id."""

    cores: list[CoreSet] | None = None
    """CPU only: the set of cores of each rank, e.g. ``[[0], [1]]``. None: shared out at start-up."""

    @model_validator(mode="after")
    def _one_core_set_a_rank(self) -> EngineConfig:
        if self.cores is not None and len(self.cores) != self.tensor_parallel_size:
            raise ValueError(
                f"cores lists {len(self.cores)} sets for {self.tensor_parallel_size} ranks; "
                "give one set of cores per tensor-parallel rank, or leave cores out"
            )
        return self


class TargetConfig(EngineConfig):
    """The model whose distribution is served."""

    tokenizer: str | None = None
    """Tokenizer directory or hub id. None: the model's own."""


class DraftModelConfig(EngineConfig):
    """A smaller language model with the target's vocabulary, in its own engine with its own KV cache."""

    method: Literal["draft_model"]
    """``draft_model``."""

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


class NgramConfig(_Section):
    """Prompt lookup: propose what followed the last occurrence of the current n-gram."""

    method: Literal["ngram"]
    """``ngram``."""

    prompt_lookup_min: int = Field(2, ge=1)
    """Shortest n-gram that counts as a match."""

    prompt_lookup_max: int = Field(4, ge=1)
    """Longest n-gram looked for; longer matches win."""

    cores: list[CoreSet] | None = None
    """CPU only: the one set of cores of this drafter. None: shared out at start-up."""

    @property
    def tensor_parallel_size(self) -> int:
        return 1

    @model_validator(mode="after")
    def _range(self) -> NgramConfig:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min ({self.prompt_lookup_min}) is above prompt_lookup_max "
                f"({self.prompt_lookup_max}); swap or equal them"
            )
        if self.cores is not None and len(self.cores) != 1:
            raise ValueError("an ngram drafter is one process: give one set of cores")
        return self


DrafterConfig = Annotated[DraftModelConfig | NgramConfig, Field(discriminator="method")]


class SpeculationConfig(_Section):
    num_speculative_tokens: int = Field(4, ge=1, le=MAX_SPECULATIVE_TOKENS)
    """K: most tokens drafted a round. A request may ask for fewer, or none. To serve without
    speculation leave the ``drafter`` section out; K = 0 is not a way to say it."""

    verification: Literal["rejection", "block", "coupled"] = "rejection"
    """How drafts of sampled requests are verified; every way is exact. ``rejection`` and ``block`` accept most, and
    the drafter ships its distribution. ``coupled`` ships token ids only and gives the same tokens whatever the drafter
    did; requests with a seed or structured output always use it, unless a seeded request asks for another. Temperature
    0 is greedy in any case."""

    draft_top_n: int = Field(64, ge=0, le=MAX_DRAFT_TOP_N)
    """rejection, block: likeliest tokens the drafter samples from and ships with probabilities, per position. 0:
    greedy drafts, nothing but ids travels."""

    adaptive: bool = True
    """Choose 0 to K tokens for each request and round, from measured acceptance and step times; false: always K."""

    draft_ahead: bool = True
    """Draft the next round while the target verifies this one."""

    max_side_branches: int = Field(8, ge=0, le=64)
    """draft_ahead: side branches a request, for outcomes other than the main line's. Bounds the drafter's memory."""

    @field_validator("num_speculative_tokens", mode="before")
    @classmethod
    def _in_range(cls, value: Any) -> Any:
        if isinstance(value, int) and not 1 <= value <= MAX_SPECULATIVE_TOKENS:
            raise ValueError(
                f"must be 1 to {MAX_SPECULATIVE_TOKENS}; to serve without speculation leave the drafter section out"
            )
        return value


class LinkConfig(_Section):
    """The wire between one verifier and one drafter."""

    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """auto: gloo. Messages are a few KB of host data, and a posted NCCL receive holds up whatever waits for the whole
    device; nccl is there to be asked for until the two have been measured between two GPUs."""

    round_deadline_ms: float = Field(1000.0, gt=0, allow_inf_nan=False)
    """Longest a round waits for proposals. Later ones count as none: the round decodes plainly."""

    link_deadline_ms: float = Field(5000.0, gt=0, allow_inf_nan=False)
    """Silence after which the link is given up, aborted and made anew with a new epoch."""

    @model_validator(mode="after")
    def _order(self) -> LinkConfig:
        if self.link_deadline_ms <= self.round_deadline_ms:
            raise ValueError(
                f"link_deadline_ms ({self.link_deadline_ms:g}) must exceed round_deadline_ms "
                f"({self.round_deadline_ms:g}): the first ends the link, the second one round"
            )
        return self


class ServingConfig(_Section):
    served_model_name: str | None = None
    """Name clients may put in ``model``. None: the last part of ``target.model``."""

    app_name: str = Field("outrider", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    """Serve application, and the registry's name."""

    num_replicas: int = Field(1, ge=1)
    """Target replicas, each with its own drafter."""

    host: str = "127.0.0.1"
    """Address the proxies listen on."""

    grpc_port: int = Field(9000, ge=0, le=65535)
    """0: any free port."""

    http_port: int = Field(8000, ge=0, le=65535)
    """Serve's own HTTP proxy; 0: any free port."""

    max_ongoing_requests: int = Field(64, ge=1)
    """Requests a replica holds at once; its scheduler batches max_num_seqs of them."""

    max_queued_requests: int = Field(256, ge=1)
    """Requests waiting beyond this are refused at once with RESOURCE_EXHAUSTED."""


class OutriderConfig(_Section):
    target: TargetConfig
    """The model to serve."""

    drafter: DrafterConfig | None = None
    """None serves the target without speculation."""

    speculation: SpeculationConfig = SpeculationConfig()
    link: LinkConfig = LinkConfig()
    serving: ServingConfig = ServingConfig()

    @model_validator(mode="after")
    def _vocabulary_is_wide_enough(self) -> OutriderConfig:
        drafter, top_n = self.drafter, self.speculation.draft_top_n
        if isinstance(drafter, DraftModelConfig) and 0 < (drafter.draft_vocab_size or 0) < top_n:
            raise ValueError(
                f"drafter.draft_vocab_size ({drafter.draft_vocab_size}) is below speculation.draft_top_n ({top_n}); "
                "raise the first or lower the second"
            )
        return self

    @property
    def served_model_name(self) -> str:
        return self.serving.served_model_name or Path(self.target.model.rstrip("/")).name

    @property
    def num_speculative_tokens(self) -> int:
        return self.speculation.num_speculative_tokens if self.drafter is not None else 0


def parse_config(data: Any, source: str = "config") -> OutriderConfig:
    """Validate a decoded YAML document.

    Raises ConfigError listing every wrong field by its dotted path, with what was found and what is allowed.
    """
    if not isinstance(data, dict):
        raise ConfigError(f"{source}: expected a mapping with a 'target' section, found {type(data).__name__}")
    try:
        return OutriderConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"{source}: {_explain(error)}") from None


def load_config(path: str | Path) -> OutriderConfig:
    """Read one YAML file. Raises ConfigError for a missing file, bad YAML or a wrong field."""
    path = Path(path)
    try:
        data = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{path}: not readable as YAML: {error}") from None
    return parse_config(data, str(path))


def _explain(error: ValidationError) -> str:
    lines = []
    for item in error.errors():
        where = ".".join(str(part) for part in item["loc"] if part not in ("draft_model", "ngram")) or "config"
        if item["type"] == "extra_forbidden":
            lines.append(f"{where}: unknown key; remove it or check its spelling")
        elif item["type"] == "missing":
            lines.append(f"{where}: required, but missing")
        else:
            found = item.get("input")
            shown = "" if isinstance(found, (dict, list)) or _is_nan(found) else f" (found {found!r})"
            lines.append(f"{where}: {item['msg'].removeprefix('Value error, ')}{shown}")
    return "; ".join(lines)


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)
