"""One typed configuration for a deployment: ``target``, ``drafter``, ``speculation``, ``link``, ``serving`` and more.

Keys are vLLM's wherever vLLM has one. Unknown keys are errors. Everything that can be known to be wrong without loading
a model is rejected here before anything starts, in words, every wrong field by its dotted path.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from outrider.cluster.backends import DEVICE_BACKENDS, Backend
from outrider.cluster.co_located_config import CoLocatedConfig as CoLocatedConfig
from outrider.cluster.config_section import ConfigError as ConfigError
from outrider.cluster.config_section import EngineConfig as EngineConfig
from outrider.cluster.config_section import NodeLabels as NodeLabels
from outrider.cluster.config_section import Section, read_yaml
from outrider.cluster.drafter_config import TAGS, DrafterConfig, refusal_of
from outrider.cluster.drafter_config import DraftModelConfig as DraftModelConfig
from outrider.cluster.drafter_config import LookupConfig as LookupConfig
from outrider.cluster.drafter_config import NgramConfig as NgramConfig
from outrider.cluster.drafter_config import RemoteConfig as RemoteConfig
from outrider.cluster.drafter_config import SuffixConfig as SuffixConfig
from outrider.cluster.engine_args import ADAPTERS_PASSED_ON, MEDIA_PASSED_ON
from outrider.cluster.limits import LimitsConfig as LimitsConfig
from outrider.cluster.lora_config import LoraConfig as LoraConfig
from outrider.cluster.multimodal_config import MultimodalConfig as MultimodalConfig
from outrider.cluster.scaling_config import AutoscalingConfig as AutoscalingConfig
from outrider.cluster.serving_config import NodeType as NodeType
from outrider.cluster.serving_config import ServingConfig as ServingConfig

_KEY = re.compile(r"([a-z_]+): ")


class OpenAIConfig(Section):
    """OpenAI's HTTP endpoints. Keys are vLLM's."""

    chat_template: str | None = Field(None, min_length=1)
    """File with a Jinja template for chats, or the template itself. None: the tokenizer's own."""

    tool_call_parser: str | None = Field("auto", min_length=1)
    """vLLM's name of the format in which the model calls tools, e.g. ``hermes``. auto: that of the model's family,
    where the model and its chat template leave no doubt. None, or where auto finds none: requests with ``tools`` are
    refused, unless with ``tool_choice: none``."""

    reasoning_parser: str | None = Field("auto", min_length=1)
    """vLLM's name of the format in which the model marks its reasoning, e.g. ``qwen3``; it then comes apart from the
    answer, and grammars hold for the answer only. auto: that of the model's family, where it reasons without being
    asked to. None, or where auto finds none: reasoning is part of the answer."""

    frontend_args: dict[str, Any] = Field(default_factory=dict)
    """Other arguments of ``vllm serve`` for its OpenAI server, under vLLM's names, e.g.
    ``{enable_prompt_tokens_details: true, response_role: assistant}``."""

    @field_validator("frontend_args")
    @classmethod
    def _are_not_of_the_socket(cls, value: dict[str, Any]) -> dict[str, Any]:
        """Refuses what would have no effect here."""
        for name, instead in _ELSEWHERE.items():
            if name in value:
                raise ValueError(f"{name}: has no effect here; {f'set {instead}' if instead else 'leave it out'}")
        return value


_ELSEWHERE: dict[str, str | None] = {
    "api_key": "serving.api_key",
    "allowed_origins": "serving.allowed_origins",
    "host": "serving.gateway.host",
    "port": "serving.gateway.http_port",
    "grpc_port": "serving.gateway.grpc_port",
    "ssl_keyfile": "serving.gateway.tls.key",
    "ssl_certfile": "serving.gateway.tls.certificate",
    "ssl_ca_certs": "serving.gateway.tls.client_ca",
    "lora_modules": "target.lora.adapters",
    "chat_template": "openai.chat_template",
    "tool_call_parser": "openai.tool_call_parser",
    **dict.fromkeys(
        (
            "root_path", "uds", "uvicorn_log_level", "disable_uvicorn_access_log", "allow_credentials",
            "allowed_methods", "allowed_headers", "ssl_cert_reqs", "ssl_ciphers", "enable_ssl_refresh",
            "h11_max_incomplete_event_size", "h11_max_header_count", "enable_server_load_tracking",
            "enable_offline_docs", "disable_fastapi_docs",
        )
    ),
}  # fmt: skip
"""By argument of vLLM's: the key that does it here, or None where nothing does."""


MAX_SPECULATIVE_TOKENS = 32
"""Upper limit of ``num_speculative_tokens``: sizes the link's frames and the verifier's rows."""

MAX_DRAFT_TOP_N = 128
"""Upper limit of ``draft_top_n``: sizes the link's frames and what a GPU program holds of q. 64 loses nothing."""


class TargetConfig(EngineConfig):
    """The model whose distribution is served."""

    tokenizer: str | None = None
    """Tokenizer directory or hub id. None: the model's own."""

    pipeline_parallel_size: int = Field(1, ge=1)
    """Stages that the layers are split over, of tensor_parallel_size ranks each, all on one node. One step is in them
    at a time: [architecture.md](architecture.md#pipeline-stages)."""

    node_labels: NodeLabels = Field(default_factory=dict)
    """Labels that a node has to carry, with the value of each, to be given a replica with its ranks, e.g. ``{zone: a}``
    (``ray start --labels``; ``labels`` of a KubeRay group)."""

    async_scheduling: bool | None = None
    """Schedule a step while the one before it runs. The tokens are the same either way. None: true, but false with
    several pipeline stages, which cannot."""

    lora: LoraConfig | None = None
    """A mapping: LoRA adapters, one of which a request may name ([lora.md](lora.md)). None: a name is refused."""

    multimodal: MultimodalConfig | None = None
    """A mapping: pictures in requests, of a target that can see them ([pictures.md](pictures.md)). None: text alone."""

    @model_validator(mode="after")
    def _belong_together(self) -> TargetConfig:
        if self.async_scheduling and self.pipeline_parallel_size > 1:
            raise ValueError(
                f"async_scheduling: true does not go with pipeline_parallel_size ({self.pipeline_parallel_size}) above "
                "1: a step is scheduled when all stages are done with the one before it; leave it out"
            )
        for section, passed_on, idle in (
            (self.lora, ADAPTERS_PASSED_ON, "is about adapters, and there are none; write target.lora"),
            (self.multimodal, MEDIA_PASSED_ON, "is about pictures, and none are taken; write target.multimodal"),
        ):
            if section is None and (name := next((name for name in passed_on if name in self.engine_args), None)):
                raise ValueError(f"engine_args.{name} {idle}, or remove it")
        if self.multimodal is not None and self.engine_args.get("language_model_only"):
            raise ValueError(
                "engine_args.language_model_only: does not go with target.multimodal; remove one of the two"
            )
        if self.multimodal is not None and self.pipeline_parallel_size > 1:
            raise ValueError(
                f"multimodal: pictures have never been run with pipeline_parallel_size ({self.pipeline_parallel_size}) "
                "above 1; set tensor_parallel_size, or remove one of the two"
            )
        return self

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def verifier_rank(self) -> int:
        """The first of the last stage, where the logits are."""
        return self.num_ranks - self.tensor_parallel_size

    @property
    def schedules_ahead(self) -> bool:
        return self.pipeline_parallel_size == 1 if self.async_scheduling is None else self.async_scheduling


class SpeculationConfig(Section):
    """How much is drafted, and how it is verified."""

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

    max_side_branches: int = Field(12, ge=0, le=64)
    """draft_ahead: side branches a request, for outcomes other than the main line's. Bounds the drafter's memory."""

    @field_validator("num_speculative_tokens", mode="before")
    @classmethod
    def _in_range(cls, value: Any) -> Any:
        if isinstance(value, int) and not 1 <= value <= MAX_SPECULATIVE_TOKENS:
            raise ValueError(
                f"must be 1 to {MAX_SPECULATIVE_TOKENS}; to serve without speculation leave the drafter section out"
            )
        return value


class LinkConfig(Section):
    """The wire between one verifier and one drafter."""

    backend: Backend = "auto"
    """auto: local, a Unix socket, where both ends are on one machine and it reaches from one to the other, else gloo.
    nccl (CUDA, ROCm), hccl (Ascend) and xccl (Intel) move a device's memory and need a device at both ends; they are
    there to be asked for until they have been measured between two devices. Messages are a few KB of host data, and a
    posted NCCL receive holds up whatever waits for the whole device."""

    round_deadline_ms: float = Field(1000.0, gt=0, allow_inf_nan=False)
    """Longest a round waits for proposals. Later ones count as none: the round decodes plainly. Left out on GPU: 250,
    and round_deadline_steps."""

    round_deadline_steps: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Likewise, in steps of the target as they are measured while it runs; the shorter of the two counts. None: none
    but round_deadline_ms. Left out on GPU, without a round_deadline_ms: 2."""

    link_deadline_ms: float = Field(5000.0, gt=0, allow_inf_nan=False)
    """Silence after which the link is given up, aborted and made anew with a new epoch. Left out on GPU: 1000, or twice
    a round_deadline_ms that is longer."""

    frame_mac: Literal["across_nodes", "always"] = "across_nodes"
    """Which links seal each frame with a keyed MAC, so that nobody on the way can change, add or repeat one: those
    between two nodes (``across_nodes``), or those within one as well (``always``), where other users of the machine are
    not trusted. Either way both ends show each other first that they are of one application."""

    @model_validator(mode="after")
    def _order(self) -> LinkConfig:
        if self.link_deadline_ms <= self.round_deadline_ms:
            raise ValueError(
                f"link_deadline_ms ({self.link_deadline_ms:g}) must exceed round_deadline_ms "
                f"({self.round_deadline_ms:g}): the first ends the link, the second one round"
            )
        return self


class OutriderConfig(Section):
    target: TargetConfig
    """The model to serve."""

    drafter: DrafterConfig | None = None
    """None serves the target without speculation."""

    speculation: SpeculationConfig = SpeculationConfig()
    link: LinkConfig = LinkConfig()
    serving: ServingConfig = ServingConfig()
    limits: LimitsConfig = LimitsConfig()
    openai: OpenAIConfig = OpenAIConfig()

    @model_validator(mode="before")
    @classmethod
    def _vllm_place_of_k(cls, data: Any) -> Any:
        """``num_speculative_tokens`` may stand in the drafter section, as in vLLM's ``speculative_config``."""
        if not isinstance(data, dict) or not isinstance(section := data.get("drafter"), dict):
            return data
        if "num_speculative_tokens" not in section:
            return data
        drafter = dict(section)
        k = drafter.pop("num_speculative_tokens")
        speculation = data.get("speculation", {})
        if not isinstance(speculation, dict):
            return data
        if speculation.get("num_speculative_tokens", k) != k:
            raise ValueError(
                f"num_speculative_tokens is {k} in the drafter section and {speculation['num_speculative_tokens']} in "
                "speculation; give it once"
            )
        return {**data, "drafter": drafter, "speculation": {**speculation, "num_speculative_tokens": k}}

    @field_validator("drafter", mode="before")
    @classmethod
    def _known_method(cls, section: Any) -> Any:
        if isinstance(section, dict) and (refusal := refusal_of(section)) is not None:
            raise ValueError(refusal)
        return section

    @model_validator(mode="after")
    def _vocabulary_is_wide_enough(self) -> OutriderConfig:
        drafter, top_n = self.drafter, self.speculation.draft_top_n
        for section, engine in drafter.models.items() if isinstance(drafter, DraftModelConfig) else ():
            if 0 < (engine.draft_vocab_size or 0) < top_n:
                raise ValueError(
                    f"{section}.draft_vocab_size ({engine.draft_vocab_size}) is below speculation.draft_top_n "
                    f"({top_n}); raise the first or lower the second"
                )
        return self

    @model_validator(mode="after")
    def _adapters_and_pictures_fit(self) -> OutriderConfig:
        lora = self.target.lora
        names = [adapter.name for adapter in lora.adapters] if lora is not None else []
        if self.served_model_name in names:
            raise ValueError(
                f"target.lora.adapters: one is called {self.served_model_name!r}, as the model itself is served; "
                "rename it, or set serving.served_model_name"
            )
        own = self.drafter.lora if isinstance(self.drafter, DraftModelConfig) else None
        for adapter in own.adapters if own is not None else ():
            if adapter.name not in names:
                raise ValueError(
                    f"drafter.lora.adapters: {adapter.name!r} is none of target.lora.adapters, so no request has it; "
                    "name one of these, or remove it"
                )
        return self

    @model_validator(mode="after")
    def _device_links_are_between_two_devices(self) -> OutriderConfig:
        """A drafter process without a device of its own would take another's."""
        drafter = self.remote_drafter
        if self.link.backend not in DEVICE_BACKENDS or drafter is None:
            return self
        needs = f"link.backend: {self.link.backend} needs a device at both ends"
        if isinstance(drafter, LookupConfig):
            raise ValueError(f"{needs}, and a drafter of method {drafter.method} has none; use auto")
        if drafter.tensor_parallel_size > 1:
            raise ValueError(
                f"{needs}, and with drafter.tensor_parallel_size above 1 the drafter's are its ranks', none of which "
                "holds the link; use auto"
            )
        return self

    @model_validator(mode="after")
    def _co_located_is_vllms(self) -> OutriderConfig:
        """Settings of our rounds would be ignored by vLLM's: refused, except as the defaults they are."""
        drafter = self.drafter
        if not isinstance(drafter, CoLocatedConfig):
            return self
        for name, taken, there in (
            ("lora", "adapters are served", self.target.lora),
            ("multimodal", "pictures are taken", self.target.multimodal),
        ):
            if there is not None:
                raise ValueError(
                    f"target.{name}: {taken} with a drafter actor or with none, and not beside drafter.placement: "
                    "co_located, where vLLM drafts in the target's engine; remove one of the two"
                )
        for name, section, wanted in (
            ("speculation", self.speculation, ("num_speculative_tokens",)),
            ("link", self.link, ()),
        ):
            defaults = type(section)()
            for key in type(section).model_fields:
                if key not in wanted and getattr(section, key) != getattr(defaults, key):
                    raise ValueError(
                        f"{name}.{key} ({getattr(section, key)}) is about drafter actors and has no effect on "
                        "drafter.placement: co_located, where vLLM's own runner and sampler work; leave it out"
                    )
        if self.target.pipeline_parallel_size > 1:
            raise ValueError(
                f"target.pipeline_parallel_size ({self.target.pipeline_parallel_size}) must be 1 where the drafter is "
                "co_located: vLLM's runner has its drafter on the last stage, and looks for it on every one; set "
                "placement: with_target, or target.tensor_parallel_size"
            )
        size, ranks = drafter.draft_tensor_parallel_size, self.target.tensor_parallel_size
        if size not in (None, 1, ranks):
            raise ValueError(
                f"drafter.draft_tensor_parallel_size ({size}) must be 1 or target.tensor_parallel_size ({ranks}) where "
                "the drafter is co_located; placement: with_target allows any"
            )
        return self

    @property
    def drafter_model(self) -> str | None:
        """Checkpoint of the draft model or heads; None where the method has none of its own."""
        return self.drafter.model if isinstance(self.drafter, DraftModelConfig | CoLocatedConfig) else None

    @property
    def served_model_name(self) -> str:
        return self.serving.served_model_name or Path(self.target.model.rstrip("/")).name

    @property
    def num_speculative_tokens(self) -> int:
        return self.speculation.num_speculative_tokens if self.drafter is not None else 0

    @property
    def remote_drafter(self) -> RemoteConfig | None:
        """The drafter that runs in an actor; None without one, co-located drafting included."""
        return None if isinstance(self.drafter, CoLocatedConfig) else self.drafter

    @property
    def co_located(self) -> CoLocatedConfig | None:
        """The drafter that runs inside the target's engine."""
        return self.drafter if isinstance(self.drafter, CoLocatedConfig) else None


def parse_config(data: Any, source: str = "config") -> OutriderConfig:
    """Validate a decoded YAML document.

    Raises ConfigError listing every wrong field by its dotted path, with what was found and what is allowed.
    """
    if not isinstance(data, dict):
        raise ConfigError(f"{source}: expected a mapping with a 'target' section, found {type(data).__name__}")
    try:
        return OutriderConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"{source}: {explained(error)}") from None


def load_config(path: str | Path) -> OutriderConfig:
    """Read one YAML file. Raises ConfigError for a missing file, bad YAML or a wrong field."""
    path = Path(path)
    try:
        data = read_yaml(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (yaml.YAMLError, ValueError, OSError) as error:  # ValueError: no UTF-8, or a date that there is none of
        raise ConfigError(f"{path}: not readable as YAML: {error}") from None
    return parse_config(data, str(path))


def explained(error: ValidationError) -> str:
    lines = []
    for item in error.errors():
        parts = [str(part) for part in item["loc"] if part not in TAGS]
        where = ".".join(parts) or "config"
        if item["type"] == "extra_forbidden":
            lines.append(f"{where}: {_unknown_key(parts)}")
        elif item["type"] == "missing":
            lines.append(f"{where}: required, but missing")
        else:
            message = item["msg"].removeprefix("Value error, ")
            if parts and _KEY.match(message):
                where, message = f"{where}.{message.partition(': ')[0]}", message.partition(": ")[2]
            found = item.get("input")
            shown = "" if isinstance(found, Mapping | list | Section) or _is_nan(found) else f" (found {found!r})"
            # What is wrong between two sections names its field itself.
            lines.append(f"{where}: {message}{shown}" if parts else f"{message}{shown}")
    return "; ".join(lines)


def _unknown_key(parts: list[str]) -> str:
    """parts: of the dotted path. A key that vLLM users know gets a better answer than one that is misspelt."""
    *section, key = parts
    if section == ["drafter"] and key == "engine_args":
        return (
            "a drafter without an engine of its own has none; remove it (placement: co_located drafts in the target's "
            "engine: target.engine_args, and the keys of vLLM's speculative_config here)"
        )
    if section == ["drafter"] and key == "lora":
        return "adapters are a draft model's in a drafter actor (method: draft_model); remove it"
    if section == ["drafter"] and key == "pipeline_parallel_size":
        return "a drafter is split over tensor-parallel ranks only; set drafter.tensor_parallel_size"
    if section == ["drafter"] and key in CoLocatedConfig.model_fields:
        return (
            "unknown key of this method in a drafter actor; remove it, or set placement: co_located, where vLLM has it"
        )
    if section == ["speculation"] and (key in CoLocatedConfig.model_fields or key == "placement"):
        return "unknown key here; it belongs into the drafter section"
    return "unknown key; remove it or check its spelling"


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)
