"""``target.lora``: adapters of the target that requests may name."""

from __future__ import annotations

import os
from typing import Literal

from pydantic import Field, field_validator, model_validator

from outrider.cluster.config_section import Section

NAME = r"^[!-~]{1,128}$"
"""Of an adapter: printable ASCII without spaces. It stands in requests, answers, logs and metrics."""


def absolute(path: str) -> str:
    """Ranks and replicas have working directories of their own."""
    return os.path.abspath(os.path.expanduser(path))


class AdapterConfig(Section):
    """Keys are those of vLLM's ``--lora-modules``."""

    name: str = Field(pattern=NAME)
    """By which requests ask for it: ``adapter`` over gRPC, ``model`` over OpenAI's API."""

    path: str = Field(min_length=1)
    """Directory with ``adapter_config.json`` and ``adapter_model.safetensors``, as PEFT writes them."""

    @field_validator("path")
    @classmethod
    def _absolute(cls, path: str) -> str:
        return absolute(path)


Rank = Literal[1, 8, 16, 32, 64, 128, 256, 320, 512]


def check_names(adapters: tuple[AdapterConfig, ...]) -> None:
    """Raises ValueError for two of one name."""
    names = [adapter.name for adapter in adapters]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"adapters: two are called {twice!r}; a request could mean either, rename one")


class DraftLoraConfig(Section):
    """Adapters of the draft model's own ([lora.md](lora.md))."""

    adapters: tuple[AdapterConfig, ...] = Field(min_length=1, max_length=256)
    """Mappings of ``name``, that of one of ``target.lora.adapters``, and ``path``, a directory as there with an adapter
    of the draft model. Requests with an adapter that is not named here are drafted for without any."""

    max_lora_rank: Rank = 16
    """Highest rank of an adapter. Every one takes the memory of this rank."""

    @model_validator(mode="after")
    def _fit(self) -> DraftLoraConfig:
        check_names(self.adapters)
        return self


class LoraConfig(Section):
    """LoRA adapters that requests may name ([lora.md](lora.md)). Keys are vLLM's where vLLM has one."""

    adapters: tuple[AdapterConfig, ...] = ()
    """Loaded when a replica starts: mappings of ``name``, by which requests ask for it, and ``path``, a directory with
    ``adapter_config.json`` and ``adapter_model.safetensors`` as PEFT writes them. A deployment of one replica can load
    more while it runs (``POST /v1/load_lora_adapter``)."""

    max_lora_rank: Rank = 16
    """Highest rank of an adapter. Every one takes the memory of this rank."""

    max_loras: int = Field(4, ge=1, le=256)
    """Most adapters that are loaded at once; a batch may hold all of them. The memory for as many is taken at the
    start."""

    @model_validator(mode="after")
    def _fit(self) -> LoraConfig:
        check_names(self.adapters)
        if len(self.adapters) > self.max_loras:
            raise ValueError(
                f"adapters: {len(self.adapters)} are listed, and max_loras lets {self.max_loras} be loaded; raise it or"
                " list fewer"
            )
        return self
