"""The configuration of a deployment: ``target``, ``drafter``, ``speculation``, ``link``, ``serving`` and ``openai``.

Keys are vLLM's wherever vLLM has one. Unknown keys are errors. What is wrong without a look at the model is told before
anything starts, by dotted path. vLLM checks ``engine_args`` and a co-located drafter's section when the engine is made.
The string under a field is its line in docs/configuration.md.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import yaml
from pydantic import (
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)

from outrider.cluster.backends import DEVICE_BACKENDS, Backend
from outrider.cluster.config_section import ConfigError as ConfigError
from outrider.cluster.config_section import CoreSet, FilePath, NodeLabels, Section, explained, read_yaml
from outrider.cluster.engine_args import FRONTEND_ARGS_ELSEWHERE, REFUSED, Side
from outrider.cluster.modes import MAX_PATHS

MAX_SPECULATIVE_TOKENS = 32
"""Upper limit of ``num_speculative_tokens``. It sizes the link's frames and the verifier's rows."""

REMOTE_METHODS = ("draft_model", "ngram", "suffix")
"""Methods of a drafter actor. They need tokens only."""

MLP_SPECULATOR = "mlp_speculator"
"""The method that runs beside the verifier. It needs the target's last hidden state."""


class LoraModule(Section):
    """A LoRA adapter. Keys are those of vLLM's ``--lora-modules``."""

    name: str = Field(pattern=r"^[!-~]{1,128}$")
    """Name by which requests ask for it: ``adapter`` over gRPC, ``model`` over OpenAI's API."""

    path: FilePath
    """Directory with ``adapter_config.json`` and ``adapter_model.safetensors``, as PEFT writes them."""


class EngineConfig(Section):
    """This section configures an engine, the target's or a draft model's."""

    model: str = Field(min_length=1)
    """Checkpoint directory or hub id."""

    tensor_parallel_size: int = Field(1, ge=1)
    """Ranks that the model is sharded over, one GPU or set of cores each, all on one node."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of weights and activations. float32 makes greedy answers reproducible to the token."""

    max_model_len: int | None = Field(None, ge=2)
    """Longest sequence in tokens, prompt and answer together. Default: the checkpoint's own."""

    max_num_seqs: int = Field(16, ge=1, le=1024)
    """Maximum requests in one step. Default on GPU: 128."""

    max_num_batched_tokens: int | None = Field(None, ge=1)
    """Maximum tokens in one step. Longer prefills are chunked. Default: vLLM's."""

    kv_cache_memory_bytes: int | None = Field(None, ge=1)
    """KV cache of a rank, in bytes. Default on CPU: 512 MiB; on GPU: what ``gpu_memory_utilization`` leaves."""

    cores: list[CoreSet] | None = None
    """CPU only: the set of cores of each rank, e.g. ``[[0], [1]]``. Default: divided at start-up."""

    lora_modules: tuple[LoraModule, ...] = Field((), max_length=256)
    """LoRA adapters: mappings of ``name``, by which requests ask for it, and ``path``, a directory in PEFT's format
    ([apis.md](apis.md#lora-adapters)). A drafter's adapter serves requests with the target's adapter of the same
    name."""

    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Other engine arguments of vLLM under their names in Python, e.g. ``{kv_cache_dtype: fp8, enforce_eager: true}``.
    They reach vLLM unchanged, and vLLM checks them. Arguments that would break Outrider are refused by name."""

    side: ClassVar[Side] = "target"

    @field_validator("engine_args")
    @classmethod
    def _pass_on(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        for name in arguments:
            if name in cls.model_fields:
                raise ValueError(f"{name}: has a key of its own; write it as {cls.side}.{name}")
            if (instead := REFUSED[cls.side].get(name)) is not None:
                raise ValueError(f"{name}: is not passed on to vLLM: {instead}")
        return arguments

    @model_validator(mode="after")
    def _one_core_set_a_rank(self) -> EngineConfig:
        if self.cores is not None and len(self.cores) != self.num_ranks:
            raise ValueError(f"cores lists {len(self.cores)} sets for {self.num_ranks} ranks; give one set per rank")
        return self

    @property
    def num_ranks(self) -> int:
        """The number of processes that the model is split over."""
        return self.tensor_parallel_size

    @property
    def takes_new_weights(self) -> bool:
        """Whether weights can be replaced while the engine serves."""
        return self.engine_args.get("weight_transfer_config") is not None

    @property
    def revision(self) -> str | None:
        """Branch, tag or commit of a hub id."""
        return self.engine_args.get("revision")

    @property
    def max_lora_rank(self) -> int:
        """Highest rank of an adapter."""
        return int(self.engine_args.get("max_lora_rank", 16))


class TargetConfig(EngineConfig):
    """The model whose distribution is served."""

    pipeline_parallel_size: int = Field(1, ge=1)
    """Stages that the layers are split over, of tensor_parallel_size ranks each, all on one node. One step is in them
    at a time ([architecture.md](architecture.md#a-round))."""

    node_labels: NodeLabels = Field(default_factory=dict)
    """Labels that a node must have to get a replica with its ranks, e.g. ``{zone: a}`` (``ray start --labels``;
    ``labels`` of a KubeRay group)."""

    async_scheduling: bool | None = None
    """Schedule a step while the previous one runs. The tokens are the same either way. Default: true, but false with
    several pipeline stages."""

    @model_validator(mode="after")
    def _belong_together(self) -> TargetConfig:
        if self.async_scheduling and self.pipeline_parallel_size > 1:
            size = self.pipeline_parallel_size
            raise ValueError(f"async_scheduling: true does not go with pipeline_parallel_size ({size}); leave it out")
        return self

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def verifier_rank(self) -> int:
        """The first rank of the last stage, where the logits are."""
        return self.num_ranks - self.tensor_parallel_size

    @property
    def schedules_ahead(self) -> bool:
        return self.pipeline_parallel_size == 1 if self.async_scheduling is None else self.async_scheduling

    @property
    def serves_lora(self) -> bool:
        return bool(self.lora_modules) or bool(self.engine_args.get("enable_lora"))

    @property
    def max_loras(self) -> int:
        """Most adapters that are loaded at once."""
        return int(self.engine_args.get("max_loras", max(4, len(self.lora_modules))))

    @property
    def media_limits(self) -> dict[str, Any]:
        """vLLM's ``limit_mm_per_prompt``. A kind that is not named is not taken: each kind's encoder takes memory."""
        return {"image": 0, "video": 0, "audio": 0, **(self.engine_args.get("limit_mm_per_prompt") or {})}

    @property
    def takes_pictures(self) -> bool:
        return any(self.media_limits.values())


class LearningConfig(Section):
    """Training of the draft model on the answers it drafts for, while it serves ([learning.md](learning.md))."""

    learning_rate: float = Field(1e-4, gt=0, le=1, allow_inf_nan=False)
    """Learning rate of AdamW, after a short rise."""

    general: str | None = Field(None, min_length=1)
    """Directory of the target's texts, written by ``outrider distill`` (OUT/texts). A quarter of a batch is taken from
    them, and no version that is worse on them becomes active. Without it, a drafter forgets what its traffic does not
    contain."""

    held_out: float = Field(0.125, ge=0.01, le=0.5)
    """Share of the prompts whose answers are never trained on. Versions are compared on these."""

    num_gpus: float = Field(0.0, ge=0, le=1)
    """GPUs reserved for the trainer. 0: it trains on CPU."""

    cores: CoreSet | None = None
    """CPU only: cores of the trainer. Default: one thread on any core."""

    directory: str | None = Field(None, min_length=1)
    """Directory that keeps each version as a checkpoint for ``drafter.model``. Default: memory only."""


class Bounds(Section):
    """The least and the greatest number of something that is scaled."""

    min: int
    max: int

    @model_validator(mode="after")
    def _in_order(self) -> Bounds:
        if self.max < self.min:
            raise ValueError(f"max: {self.max} is below min ({self.min}); raise the first or lower the second")
        return self


class PoolScalingConfig(Bounds):
    """Scales the number of drafters of a pool to what gains more than it costs
    ([deployment.md](deployment.md#drafters))."""

    min: int = Field(0, ge=0, le=1024)
    """Minimum number of drafters. With 0, targets decode without drafts while no drafter pays."""

    max: int = Field(ge=1, le=1024)
    """Maximum number of drafters."""

    targets_per_drafter: int = Field(4, ge=1, le=1024)
    """Busy targets per drafter. 4 is within 3% of the best of 1, 2, 4 and 8 in simulations
    ([performance.md](performance.md#one-drafter-for-several-targets))."""

    worth: float = Field(1.0, ge=0, le=1000, allow_inf_nan=False)
    """Required gain of a drafter in tokens per second over plain decoding, relative to what its accelerators would do
    as part of a target. 0: any gain is enough."""

    downscale_delay_s: float = Field(300.0, ge=0, le=86_400)
    """Time for which one drafter fewer must be enough before one is stopped."""


class ActorConfig(Section):
    """A drafter in an actor of its own."""

    placement: Literal["with_target", "pool"] = "with_target"
    """``with_target``: one drafter per target replica. ``pool``: ``num_drafters`` shared by all target replicas, which
    also serve without one."""

    num_drafters: int = Field(1, ge=1, le=1024)
    """``placement: pool``: number of drafters. See ``targets_per_drafter`` under drafter.autoscaling."""

    autoscaling: PoolScalingConfig | None = None
    """``placement: pool``: scales the number of drafters; replaces ``num_drafters``."""

    node_labels: NodeLabels = Field(default_factory=dict)
    """Labels that a node must have to get a drafter, e.g. ``{zone: a}``. If they exclude the target's, the two are on
    different nodes."""

    @property
    def pooled(self) -> bool:
        return self.placement == "pool"

    @property
    def remembers_answers(self) -> bool:
        """Whether it drafts from other requests' answers."""
        return False

    @property
    def most_drafters(self) -> int:
        return self.num_drafters if self.autoscaling is None else self.autoscaling.max

    @model_validator(mode="after")
    def _num_drafters_of_a_pool(self) -> ActorConfig:
        if self.num_drafters > 1 and not self.pooled:
            raise ValueError(f"num_drafters ({self.num_drafters}): only with placement: pool")
        if self.autoscaling is not None and not self.pooled:
            raise ValueError("autoscaling: only with placement: pool; serving.autoscaling is for targets")
        if self.autoscaling is not None and self.num_drafters > 1:
            raise ValueError("num_drafters: is given beside autoscaling, which decides it; leave it out")
        return self


class DraftModelConfig(ActorConfig, EngineConfig):
    """A smaller model with the same tokenizer, in its own engine with its own KV cache. Vocabularies may be padded to
    different sizes."""

    side: ClassVar[Side] = "drafter"

    method: Literal["draft_model"]
    """``draft_model``."""

    prefill_chunk_tokens: int = Field(128, ge=1)
    """Prompt tokens that the drafter processes between two rounds. Bounds how long a prefill delays a proposal. Default
    on GPU: 1024."""

    draft_vocab_size: int | None = Field(None, ge=0)
    """Tokens that the drafter's output head is cut to, which makes a draft step cheaper; they follow what prompts hold
    and answers use. Answers stay exact. 0: all. Default: as many as it was trained on, else 32768 where the vocabulary
    is at least twice as large, else all; with several ranks all. Default on GPU: 0."""

    parallel_drafting: bool | None = None
    """Draft in [one pass](methods.md#one-pass-draft-models). Default: if the checkpoint has a mask token."""

    max_draft_rows: int = Field(128, ge=1, le=4096)
    """Maximum rows in one step of the drafter: sequences and their side branches."""

    beside: list[Literal["ngram", "suffix"]] = Field(default_factory=list)
    """Look-ups that draft beside the model with default settings. Each round uses the drafter with the highest expected
    speed ([methods.md](methods.md#look-ups-beside-a-model))."""

    learn: LearningConfig | None = None
    """Trains the draft model while it serves: a mapping with the keys under drafter.learn."""

    @property
    def remembers_answers(self) -> bool:
        return "suffix" in self.beside

    @model_validator(mode="after")
    def _can_work(self) -> DraftModelConfig:
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < 64:
            raise ValueError("max_num_batched_tokens: one sequence feeds up to 64 tokens in a step; set that many")
        if self.draft_vocab_size and self.tensor_parallel_size > 1:
            raise ValueError("draft_vocab_size: needs the output head on one rank; set tensor_parallel_size: 1")
        if self.learn is not None and self.lora_modules:
            raise ValueError("learn: a drafter with lora_modules is not trained; leave one of the two out")
        if self.learn is not None and (quantization := self.engine_args.get("quantization")) is not None:
            raise ValueError(f"learn: weights quantised as {quantization} cannot be trained; leave one of the two out")
        return self


class LookupConfig(ActorConfig):
    """A drafter that only searches text: one process, no model, no GPU."""

    cores: list[CoreSet] | None = Field(None, max_length=1)
    """CPU only: the one set of cores of this drafter, e.g. ``[[1]]``. Default: shared out at start-up."""

    @property
    def tensor_parallel_size(self) -> int:
        return 1


class NgramConfig(LookupConfig):
    """Prompt look-up without a model: proposes what followed the last occurrence of the current n-gram."""

    method: Literal["ngram"]
    """``ngram``."""

    prompt_lookup_min: int = Field(2, ge=1)
    """Shortest n-gram that counts as a match."""

    prompt_lookup_max: int = Field(4, ge=1)
    """Longest n-gram that is looked up. Longer matches win."""

    @model_validator(mode="after")
    def _range(self) -> NgramConfig:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(f"prompt_lookup_min: {self.prompt_lookup_min} is above prompt_lookup_max; swap them")
        return self


class SuffixConfig(LookupConfig):
    """Suffix decoding without a model: proposes what followed the longest matching suffixes of the text, in the request
    and in recent answers of other requests. Keys are vLLM's."""

    method: Literal["suffix"]
    """``suffix``."""

    suffix_decoding_max_tree_depth: int = Field(24, ge=2, le=256)
    """Maximum tokens of match and draft together."""

    suffix_decoding_max_cached_requests: int = Field(10000, ge=0)
    """Answers remembered for other requests, first in, first out. 0: none."""

    suffix_decoding_max_spec_factor: float = Field(1.0, ge=0, allow_inf_nan=False)
    """Maximum drafted tokens per matching token."""

    suffix_decoding_min_token_prob: float = Field(0.1, ge=0, le=1, allow_inf_nan=False)
    """Drafting stops when the estimated probability of the draft falls below this."""

    @property
    def remembers_answers(self) -> bool:
        return True


class OnTargetConfig(Section):
    """A drafter that runs on the target's ranks, without an actor, GPUs or cores of its own."""


class MLPSpeculatorConfig(OnTargetConfig):
    """Heads that predict the next tokens from the target's last hidden state, such as IBM's accelerators. They run on
    the target's rank that chooses tokens, in Outrider's rounds: no drafter actor, no link."""

    method: Literal["mlp_speculator"]
    """``mlp_speculator``. vLLM's short form ``mlp`` is the same in ``speculative_config``."""

    model: str = Field(min_length=1)
    """Checkpoint of the heads (``MLPSpeculatorPreTrainedModel``, safetensors), directory or hub id. Made for this
    target: its ``emb_dim`` is the target's hidden size, and ``num_speculative_tokens`` is at most its ``n_predict``."""

    revision: str | None = None
    """Branch, tag or commit of a hub id."""


class CoLocatedConfig(OnTargetConfig):
    """Drafting inside the target's engine, on its ranks and in its KV cache. The section is vLLM's
    ``speculative_config``: keys reach vLLM unchanged, and vLLM checks them."""

    model_config = ConfigDict(extra="allow")

    placement: Literal["co_located"]
    """``co_located``."""

    method: str = Field(min_length=1)
    """vLLM's name of the method: ``eagle3``, ``mtp``, ``medusa``, ``dflash``, ``draft_model``, …"""

    model: str | None = Field(None, min_length=1)
    """Checkpoint of the draft model or heads, directory or hub id, if the method has one."""

    @model_validator(mode="after")
    def _can_be_passed_on(self) -> CoLocatedConfig:
        given = self.model_extra or {}
        if self.method == "custom_class":
            raise ValueError("method: custom_class is how Outrider itself drafts in vLLM; name another method")
        synthetic = [key for key in given if key.startswith("synthetic_acceptance") and given[key] is not None]
        if given.get("rejection_sample_method") == "synthetic":
            synthetic.append("rejection_sample_method")
        if synthetic:
            raise ValueError(f"{synthetic[0]}: synthetic acceptance changes the answers' distribution; leave it out")
        return self

    def speculative_config(self, num_speculative_tokens: int) -> dict[str, Any]:
        """vLLM's ``speculative_config``."""
        keys = self.model_dump(exclude={"placement"}, exclude_none=True)
        return {**keys, "num_speculative_tokens": num_speculative_tokens}


RemoteConfig = DraftModelConfig | NgramConfig | SuffixConfig
"""A drafter in an actor of its own."""


def _tag(value: Any) -> str | None:
    """The class that a section belongs to. None, for a section without a usable method, is the error of the union."""
    read = value.get if isinstance(value, dict) else lambda name: getattr(value, name, None)
    if read("placement") == "co_located":
        return "co_located"
    method = read("method")
    return method if method in (*REMOTE_METHODS, MLP_SPECULATOR) else None


DrafterConfig = Annotated[
    Annotated[DraftModelConfig, Tag("draft_model")]
    | Annotated[NgramConfig, Tag("ngram")]
    | Annotated[SuffixConfig, Tag("suffix")]
    | Annotated[MLPSpeculatorConfig, Tag("mlp_speculator")]
    | Annotated[CoLocatedConfig, Tag("co_located")],
    Discriminator(_tag),
]


def _refusal_of(section: Mapping[str, Any]) -> str | None:
    """What is wrong with a drafter's ``placement`` or ``method``, as ``field: problem; fix``."""
    placement, method = section.get("placement", "with_target"), section.get("method")
    if method == MLP_SPECULATOR:
        return (
            "placement: mlp_speculator runs on the target's ranks alone; leave it out"
            if "placement" in section
            else None
        )
    if placement not in ("with_target", "pool", "co_located"):
        return f"placement: must be 'with_target', 'pool' or 'co_located' (found {placement!r})"
    if placement != "co_located" and method not in REMOTE_METHODS:
        return (
            f"method: a drafter actor takes {', '.join(REMOTE_METHODS)}; for a method of vLLM's own, such as eagle3, "
            f"set placement: co_located (found {method!r})"
        )
    return None


class SpeculationConfig(Section):
    """How many tokens are drafted, and how they are verified."""

    num_speculative_tokens: int = Field(4, ge=1, le=MAX_SPECULATIVE_TOKENS)
    """K: maximum draft tokens per round. A request may ask for fewer, or none."""

    num_paths: int = Field(1, ge=1, le=MAX_PATHS)
    """Paths of a request's draft tree that a step may verify, each in rows of its own; 1: a chain. More need a one-pass
    draft model, and for sampled requests coupled verification. Structured output has one."""

    verification: Literal["rejection", "block", "coupled"] | None = None
    """How drafts of sampled requests are verified; every mode is exact ([exactness.md](exactness.md)). ``coupled``
    sends token ids only and gives the same tokens whatever the drafter does; requests with a seed or structured output
    use it by default. Temperature 0 is always greedy. Default: rejection, or coupled where num_paths exceeds 1."""

    draft_top_n: int = Field(64, ge=0, le=128)
    """rejection, block: number of likeliest tokens that the drafter samples from and sends with probabilities, per
    position. 0: greedy drafts, ids only."""

    adaptive: bool = True
    """Choose 0 to K tokens per request and round from measured acceptance and step times; false: always K."""

    draft_ahead: bool = True
    """Draft the next round while the target verifies this one."""

    max_side_branches: int = Field(12, ge=0, le=64)
    """draft_ahead: side branches per request, for outcomes other than the main line's. Bounds the drafter's memory."""

    @property
    def default_verification(self) -> str:
        """Returns how a sampled request is verified that has neither a choice of its own nor a seed."""
        return self.verification or ("rejection" if self.num_paths == 1 else "coupled")


class LinkConfig(Section):
    """The wire between one verifier and one drafter."""

    backend: Backend = "auto"
    """auto: host memory, over ZeroMQ: ipc:// within a machine, encrypted tcp:// between machines. nccl (CUDA, ROCm),
    hccl (Ascend) and xccl (Intel) move a device's memory, need a device at both ends, and have not been measured
    between two."""

    round_deadline_ms: float = Field(1000.0, gt=0, allow_inf_nan=False)
    """Longest time that a round waits for proposals. Later ones count as none: the round decodes plainly."""

    round_deadline_steps: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Likewise, in steps of the target as they are measured while it runs; the shorter of the two counts. Default:
    round_deadline_ms alone. Default on GPU, without a round_deadline_ms: 2."""

    link_deadline_ms: float = Field(5000.0, gt=0, allow_inf_nan=False)
    """Silence after which the link is given up, aborted and made anew with a new epoch."""

    @model_validator(mode="after")
    def _order(self) -> LinkConfig:
        if self.link_deadline_ms <= self.round_deadline_ms:
            shown = f"({self.link_deadline_ms:g}) must exceed round_deadline_ms ({self.round_deadline_ms:g})"
            raise ValueError(f"link_deadline_ms {shown}: the first ends the link, the second one round")
        return self


class GatewayTls(Section):
    """TLS of the gateway's listeners. Changed files are read again."""

    certificate: FilePath
    """Certificate (PEM), with its chain."""

    key: FilePath
    """Private key (PEM, without a passphrase) of the certificate."""

    client_ca: FilePath | None = None
    """Authorities (PEM); clients must show a certificate of one of them. Default: no client certificates."""


class GatewayConfig(Section):
    """HAProxy in front of Serve's HTTP and gRPC proxies ([deployment.md](deployment.md#gateway))."""

    host: str = Field("127.0.0.1", pattern=r"^[A-Za-z0-9_.:-]+$")
    """Address on which the gateway listens. ``0.0.0.0`` or ``::``: every interface."""

    http_port: int = Field(8000, ge=0, le=65535)
    """Port of OpenAI's API and the page. 0: any free one."""

    grpc_port: int = Field(9000, ge=0, le=65535)
    """Port of the gRPC API. 0: any free one."""

    tls: GatewayTls | None = None
    """Certificate, key and client authorities of every listener. Default: plain text."""

    keys_file: FilePath | None = None
    """File of API keys' hashes, written by ``outrider keys new``. Every call except health probes then needs a key.
    Default: no key is needed."""

    requests_per_minute: int | None = Field(None, ge=1, le=1_000_000)
    """Maximum requests per minute of one API key, or of one address without keys. A key's own ``requests_per_minute``
    has precedence. Health, status and aborts do not count. Default: no limit."""

    max_connections_per_address: int = Field(200, ge=1, le=1_000_000)
    """Maximum connections of one address to all listeners. An IPv6 /64 network counts as one address."""

    max_body_bytes: int = Field(8 * 2**20, ge=1024, le=2**31 - 1)
    """Maximum size of an HTTP body or gRPC message. Longer ones get 413 or RESOURCE_EXHAUSTED; bodies without a
    Content-Length get 411."""

    header_timeout_s: float = Field(10.0, gt=0, le=3600)
    """Seconds within which a request's headers and the first 32 KiB of its body must arrive."""

    idle_timeout_s: float = Field(300.0, gt=0, le=86_400)
    """Seconds after which a connection without a request is closed. At most 60 s apply to TLS handshakes and to clients
    that do not read. A client that waits for an answer is not idle."""

    admin_port: int | None = Field(None, ge=0, le=65535)
    """Port of ``/metrics``, ``/outrider/v1/status`` and HAProxy's ``/haproxy/metrics`` and ``/stats``. Default: the
    first two are on ``http_port``. 0: any free port."""


class AutoscalingConfig(Bounds):
    """Scales target replicas with the load ([deployment.md](deployment.md#autoscaling))."""

    min: int = Field(1, ge=1, le=1024)
    """Minimum number of replicas, at least 1, since a model takes long to load."""

    max: int = Field(ge=1, le=1024)
    """Maximum number of replicas."""

    target_queue_s: float = Field(5.0, gt=0, le=3600)
    """Longest time that requests may wait for an engine before replicas are added: waiting tokens, prompts and expected
    answers, divided by the tokens per second of all replicas."""

    target_round_ms: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Target median step time in milliseconds. When exceeded, the autoscaler adds replicas, at most one per request.
    Default: no limit."""

    target_kv_usage: float = Field(0.9, gt=0, le=1)
    """Mean KV cache usage above which replicas are added while requests wait."""

    downscale_delay_s: float = Field(300.0, ge=0, le=86_400)
    """Time for which one replica fewer must be enough before one is stopped."""


class ServingConfig(Section):
    """Replicas, ports, queues, limits per request, and monitoring."""

    served_model_name: str | None = None
    """Name that clients may put in ``model``. Default: the last part of ``target.model``."""

    app_name: str = Field("outrider", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    """Name of the Serve application and of its registry."""

    num_replicas: int = Field(1, ge=1)
    """Number of target replicas."""

    autoscaling: AutoscalingConfig | None = None
    """Scales target replicas with the load, e.g. ``{min: 1, max: 4}``; replaces ``num_replicas``. Keys under
    serving.autoscaling."""

    num_ingresses: int = Field(1, ge=1, le=16)
    """Ingress processes behind Serve's proxies, spread over the nodes. They divide ``max_ongoing_requests`` and
    ``max_queued_requests``, rounded up. Losing one loses only its own requests."""

    gateway: Annotated[
        Annotated[GatewayConfig, Tag("gateway_on")] | Annotated[Literal["off"], Tag("gateway_off")],
        Discriminator(lambda value: "gateway_off" if value in ("off", False) else "gateway_on"),
    ] = GatewayConfig()
    """HAProxy in front of Serve's proxies: ports, TLS, keys, rates and sizes. Keys under serving.gateway. ``off``:
    clients connect to Serve's own proxies."""

    host: str = Field("127.0.0.1", min_length=1)
    """Address that Serve's own HTTP and gRPC proxies listen on. ``0.0.0.0`` or ``::``: every interface."""

    http_port: int | None = Field(None, ge=0, le=65535)
    """Port of Serve's own HTTP proxy. Default: 8000 with ``gateway: off``, any free one behind a gateway."""

    grpc_port: int | None = Field(None, ge=0, le=65535)
    """Port of Serve's own gRPC proxy. Default: 9000 with ``gateway: off``, any free one behind a gateway."""

    api_key: str | None = Field(
        default_factory=lambda: os.environ.get("VLLM_API_KEY") or None, min_length=1, exclude=True, repr=False
    )
    """One key that all clients send, as ``Authorization: Bearer KEY``. Guards every HTTP path except probes and the
    page's files, and every gRPC method except health. Default: the environment variable VLLM_API_KEY, else none."""

    allowed_origins: list[str] = Field([], max_length=64)
    """Origins whose web pages may use this server (CORS), e.g. ``https://chat.example.com``; ``*``: any."""

    drain_s: float = Field(120.0, ge=0, le=86_400)
    """Time for running answers to finish when the server or a replica is taken down. New requests are refused
    meanwhile; answers that remain are cut."""

    surge: bool = False
    """Whether a deploy starts each new replica before it stops an old one. Without room for one more it then waits."""

    max_ongoing_requests: int = Field(64, ge=1)
    """Maximum requests of a replica, running and waiting; its scheduler batches max_num_seqs of them. Default on GPU:
    256."""

    max_queued_requests: int = Field(256, ge=1)
    """Maximum waiting requests. Further ones are refused with RESOURCE_EXHAUSTED (HTTP 429)."""

    default_timeout_s: float = Field(3600.0, gt=0, le=604800)
    """Deadline in seconds of a generation whose client sets none."""

    greatest_timeout_s: float = Field(86400.0, gt=0, le=604800)
    """Longest deadline in seconds that a client may set."""

    default_max_tokens: int | None = Field(None, ge=1)
    """Longest answer of a generation whose client sets no max_tokens. Default: what max_model_len leaves."""

    greatest_max_tokens: int | None = Field(None, ge=1)
    """Largest ``max_tokens`` that a client may set. Default: what max_model_len leaves."""

    tenant_isolation: bool = False
    """Separates prefix cache and suffix memory per client: per API key, or per source address without keys.
    ``cached_tokens`` is reported only then, since it reveals what others have asked."""

    structured_output: Literal["off", "json", "all"] = "all"
    """Constraints that requests may have. ``off``: none; ``json``: JSON schemas, JSON objects, choices and tools;
    ``all``: also regexes, grammars and structural tags."""

    step_watchdog_s: float = Field(30.0, ge=1, allow_inf_nan=False)
    """A replica is replaced if its engine has requests and ends no step for this long and for 20 times the usual
    step."""

    otlp_traces_endpoint: str | None = Field(None, pattern=r"^https?://\S+$")
    """OpenTelemetry collector for traces, e.g. ``http://localhost:4317`` (OTLP over gRPC). OpenTelemetry's own
    variables, such as OTEL_TRACES_SAMPLER, apply. Default: no traces."""

    log_format: Literal["text", "json"] = "text"
    """json: one object per line, with the request's id on every line about a request."""

    @model_validator(mode="after")
    def _belong_together(self) -> ServingConfig:
        if self.api_key is not None and self.gateway != "off" and self.gateway.keys_file is not None:
            raise ValueError("api_key: is given (or VLLM_API_KEY is set) beside gateway.keys_file; leave one out")
        if self.autoscaling is not None and self.num_replicas > 1:
            raise ValueError("num_replicas: is given beside autoscaling, which decides it; leave it out")
        for key in ("timeout_s", "max_tokens"):
            default, greatest = getattr(self, f"default_{key}"), getattr(self, f"greatest_{key}")
            if default is not None and greatest is not None and default > greatest:
                raise ValueError(f"default_{key}: {default:g} is above greatest_{key} ({greatest:g}); lower it")
        return self

    @field_validator("gateway", mode="before")
    @classmethod
    def _off(cls, value: Any) -> Any:
        """YAML reads a bare ``off`` as false."""
        return "off" if value is False else value

    @property
    def max_tokens_if_unset(self) -> int | None:
        """Returns max_tokens for a client that sets none; None: what max_model_len leaves."""
        return self.greatest_max_tokens if self.default_max_tokens is None else self.default_max_tokens

    @property
    def public(self) -> tuple[str, int, int]:
        """Host, HTTP port and gRPC port that clients connect to."""
        if isinstance(self.gateway, GatewayConfig):
            return self.gateway.host, self.gateway.http_port, self.gateway.grpc_port
        return (
            self.host,
            8000 if self.http_port is None else self.http_port,
            9000 if self.grpc_port is None else self.grpc_port,
        )

    @property
    def most_replicas(self) -> int:
        return self.num_replicas if self.autoscaling is None else self.autoscaling.max


class OpenAIConfig(Section):
    """OpenAI's HTTP endpoints. Further keys are arguments of ``vllm serve`` for its OpenAI server, e.g.
    ``enable_prompt_tokens_details: true``."""

    model_config = ConfigDict(extra="allow")

    chat_template: str | None = Field(None, min_length=1)
    """File with a Jinja template for chats, or the template itself. Default: the tokenizer's own."""

    tool_call_parser: str | None = Field("auto", min_length=1)
    """vLLM's tool call parser, e.g. ``hermes``. auto: that of the model's family, if its chat template is unambiguous.
    null: requests with ``tools`` are refused."""

    reasoning_parser: str | None = Field("auto", min_length=1)
    """vLLM's reasoning parser, e.g. ``qwen3``. Grammars then apply to the answer only. auto: that of the model's
    family. null: reasoning is part of the answer."""

    @model_validator(mode="after")
    def _are_not_of_the_socket(self) -> OpenAIConfig:
        for name in self.frontend_args:
            if name in FRONTEND_ARGS_ELSEWHERE:
                raise ValueError(f"{name}: has no effect here; set {FRONTEND_ARGS_ELSEWHERE[name]}")
        return self

    @property
    def frontend_args(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class OutriderConfig(Section):
    """One deployment."""

    target: TargetConfig
    """The model to serve."""

    drafter: DrafterConfig | None = None
    """None serves the target without speculation."""

    speculation: SpeculationConfig = SpeculationConfig()
    link: LinkConfig = LinkConfig()
    serving: ServingConfig = ServingConfig()
    openai: OpenAIConfig = OpenAIConfig()

    @model_validator(mode="before")
    @classmethod
    def _vllm_place_of_k(cls, data: Any) -> Any:
        """``num_speculative_tokens`` may stand in the drafter section, as in vLLM's ``speculative_config``."""
        if not isinstance(data, dict) or not isinstance(section := data.get("drafter"), dict):
            return data
        speculation = data.get("speculation", {})
        if "num_speculative_tokens" not in section or not isinstance(speculation, dict):
            return data
        drafter = dict(section)
        k = drafter.pop("num_speculative_tokens")
        if speculation.get("num_speculative_tokens", k) != k:
            raise ValueError(f"drafter.num_speculative_tokens: {k} is not speculation's; give it once")
        return {**data, "drafter": drafter, "speculation": {**speculation, "num_speculative_tokens": k}}

    @field_validator("drafter", mode="before")
    @classmethod
    def _known_method(cls, section: Any) -> Any:
        if isinstance(section, dict) and (refusal := _refusal_of(section)) is not None:
            raise ValueError(refusal)
        return section

    @model_validator(mode="after")
    def _fits_together(self) -> OutriderConfig:
        drafter, top_n = self.drafter, self.speculation.draft_top_n
        names = [module.name for module in self.target.lora_modules]
        if self.served_model_name in names:
            raise ValueError(f"target.lora_modules: {self.served_model_name!r} is the model itself; rename the adapter")
        if isinstance(drafter, DraftModelConfig):
            if 0 < (drafter.draft_vocab_size or 0) < top_n:
                raise ValueError(f"drafter.draft_vocab_size: is below speculation.draft_top_n ({top_n}); raise it")
            if unknown := [module.name for module in drafter.lora_modules if module.name not in names]:
                raise ValueError(f"drafter.lora_modules: {unknown[0]!r} is none of target.lora_modules; remove it")
        if self.speculation.num_paths > 1:
            self._check_paths()
        if isinstance(drafter, CoLocatedConfig):
            self._check_co_located()
        elif drafter is not None and self.link.backend in DEVICE_BACKENDS:
            needs = f"link.backend: {self.link.backend} needs a device at both ends"
            if isinstance(drafter, LookupConfig | MLPSpeculatorConfig):
                raise ValueError(f"{needs}, and a drafter of method {drafter.method} has none; use auto")
            if drafter.tensor_parallel_size > 1:
                raise ValueError(f"{needs}; a drafter whose tensor_parallel_size is above 1 has none; use auto")
        return self

    def _check_paths(self) -> None:
        """Refuses what cannot verify several paths of a request."""
        if not (isinstance(self.drafter, DraftModelConfig) and self.target.schedules_ahead):
            needs = "needs drafter.method: draft_model and a target without async_scheduling: false or pipeline stages"
            raise ValueError(f"speculation.num_paths: {self.speculation.num_paths} {needs}; leave it out")
        for name in ("kv_transfer_config", "decode_context_parallel_size"):
            if self.target.engine_args.get(name) not in (None, 1):
                raise ValueError(f"target.engine_args.{name}: cannot be used with speculation.num_paths; remove one")

    def _check_co_located(self) -> None:
        """Refuses what vLLM's own rounds would ignore, or have never been run with."""
        for name, section in (("speculation", self.speculation), ("link", self.link)):
            usual = type(section)()
            changed = [key for key, value in section if value != getattr(usual, key)]
            if unused := [key for key in changed if key != "num_speculative_tokens"]:
                raise ValueError(f"{name}.{unused[0]}: has no effect on drafter.placement: co_located; leave it out")
        for key, set_ in (
            ("lora_modules", self.target.serves_lora),
            ("engine_args.limit_mm_per_prompt", self.target.takes_pictures),
            ("pipeline_parallel_size", self.target.pipeline_parallel_size > 1),
        ):
            if set_:
                raise ValueError(f"target.{key} has never been run beside a co-located drafter; remove one of the two")

    @property
    def drafter_model(self) -> str | None:
        """Checkpoint of the draft model or heads. None: the method has none of its own."""
        return self.drafter.model if isinstance(self.drafter, DraftModelConfig | OnTargetConfig) else None

    @property
    def served_model_name(self) -> str:
        return self.serving.served_model_name or Path(self.target.model.rstrip("/")).name

    @property
    def num_speculative_tokens(self) -> int:
        return self.speculation.num_speculative_tokens if self.drafter is not None else 0

    @property
    def remote_drafter(self) -> RemoteConfig | None:
        """The drafter that runs in an actor. None: there is no drafter, or one on the target's ranks."""
        return None if isinstance(self.drafter, OnTargetConfig) else self.drafter

    @property
    def drafts_in_rounds(self) -> bool:
        """Whether drafts come through Outrider's rounds: from a drafter actor, or from beside the verifier."""
        return self.drafter is not None and self.co_located is None

    @property
    def co_located(self) -> CoLocatedConfig | None:
        """The drafter that runs inside the target's engine."""
        return self.drafter if isinstance(self.drafter, CoLocatedConfig) else None


def parse_config(data: Any, source: str = "config") -> OutriderConfig:
    """Validates a decoded YAML document.

    Raises ConfigError listing every wrong field by its dotted path, with what was found and what is allowed.
    """
    if not isinstance(data, dict):
        raise ConfigError(f"{source}: expected a mapping with a 'target' section, found {type(data).__name__}")
    try:
        return OutriderConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"{source}: {explained(error)}") from None


def load_config(path: str | Path) -> OutriderConfig:
    """Reads one YAML file. Raises ConfigError for a missing file, bad YAML or a wrong field."""
    try:
        data = read_yaml(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from None
    return parse_config(data, str(path))
