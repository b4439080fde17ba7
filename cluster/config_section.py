"""What every section of the configuration is made of, and what an engine's section holds."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from outrider.cluster.engine_args import Side, problems

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
NodeLabels = Annotated[
    dict[
        Annotated[str, Field(pattern=rf"^(?:[a-z0-9.-]{{1,253}}/)?{_LABEL}$")],
        Annotated[str, Field(pattern=rf"^{_LABEL}$")],
    ],
    Field(max_length=32),
]
"""Labels of Ray's nodes, each with its one value."""

CoreSet = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


class ConfigError(ValueError):
    """A configuration that cannot work. The message names the field and the fix."""


_YAML = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader


class StandsTwice(yaml.MarkedYAMLError):
    """A mapping has a key twice, of which YAML itself would take the last."""


def read_yaml(text: str) -> Any:
    """One document. Raises YAMLError, StandsTwice among them."""
    loader = _YAML(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _check_keys(node, set())
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _check_keys(node: yaml.Node, seen: set[yaml.Node]) -> None:
    if isinstance(node, yaml.ScalarNode) or node in seen:  # an alias may lead to where it stands
        return
    seen.add(node)
    if isinstance(node, yaml.SequenceNode):
        for entry in node.value:
            _check_keys(entry, seen)
        return
    keys: set[tuple[str, str]] = set()
    for key, value in node.value:
        if isinstance(key, yaml.ScalarNode):
            if (key.tag, key.value) in keys:
                raise StandsTwice(problem=f"{key.value!r} stands twice; keep one of them", problem_mark=key.start_mark)
            keys.add((key.tag, key.value))
        _check_keys(value, seen)


class Section(BaseModel):
    """Unknown keys are errors; the string under a field is its line in docs/configuration.md."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), use_attribute_docstrings=True)


class EngineConfig(Section):
    """What the target's and a model drafter's engine have in common. Every key is vLLM's."""

    model: str = Field(min_length=1)
    """Checkpoint directory or hub id."""

    tensor_parallel_size: int = Field(1, ge=1)
    """Ranks the model is sharded over, one GPU or set of cores each, all on one node."""

    dtype: Dtype = "auto"
    """Of weights and activations; float32 makes greedy answers reproducible to the token."""

    quantization: str | None = None
    """How the weights are quantised, by vLLM's name. None: what the checkpoint's own config.json says."""

    max_model_len: int | None = Field(None, ge=2)
    """Longest sequence in tokens, prompt and answer together. None: the checkpoint's own."""

    max_num_seqs: int = Field(16, ge=1, le=1024)
    """Most requests in one step. Left out on GPU: 128."""

    max_num_batched_tokens: int | None = Field(None, ge=1)
    """Most tokens in one step; longer prefills are chunked. None: vLLM's own; of a target on GPU, that of `vllm
    serve`."""

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

    engine_args: dict[str, Any] = {}
    """Any other of vLLM's engine arguments, e.g. ``{kv_cache_dtype: fp8}``, passed on as written. Which are, and why
    the others are not: [engine-args.md](engine-args.md)."""

    side: ClassVar[Side] = "target"
    """Whose engine it is, as errors name the section."""

    @field_validator("engine_args")
    @classmethod
    def _passed_on(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        own_keys = cls.model_fields.keys() - {"engine_args"}
        if found := problems(cls.side, arguments, own_keys):
            # pydantic lists the errors of such an exception as if each were of a field of its own.
            raise ValidationError.from_exception_data(
                cls.__name__,
                [
                    InitErrorDetails(
                        type=PydanticCustomError("engine_args", problem.text),
                        loc=problem.path,
                        input=problem.found,
                    )
                    for problem in found
                ],
            )
        return arguments

    @model_validator(mode="after")
    def _one_core_set_a_rank(self) -> EngineConfig:
        if self.cores is not None and len(self.cores) != self.num_ranks:
            raise ValueError(
                f"cores lists {len(self.cores)} sets for {self.num_ranks} ranks; "
                "give one set of cores per rank, or leave cores out"
            )
        return self

    @property
    def num_ranks(self) -> int:
        """Processes that the model is split over."""
        return self.tensor_parallel_size
