"""Versions on disk: whole checkpoints, which ``drafter.model`` takes, beside a note of what each was learned from."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.actors.learning.draft_models import tensors_of
from outrider.cluster.whole_files import whole_directory

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

NOTE, TENSORS = "learned.json", "model.safetensors"
_SAMPLES, _SAMPLE_BYTES = 64, 4096


class VersionStore:
    def __init__(self, directory: Path, base: Path, kept: int) -> None:
        """base: the checkpoint that learning began with. kept: versions, the latest."""
        self._directory, self._base, self._kept = directory, base, kept
        self._base_sha256 = _digest(base)

    def save(self, number: int, tensors: Mapping[str, Tensor], figures: Mapping[str, Any]) -> Path:
        """In the place of a version of that number. Raises OSError."""
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        final = self._path(number)
        with whole_directory(final) as work:
            for file in self._base.iterdir():
                if file.is_file() and file.suffix not in (".safetensors", ".bin") and "index.json" not in file.name:
                    shutil.copyfile(file, work / file.name)
            whole = {name: tensors.get(name, tensor).contiguous() for name, tensor in tensors_of(self._base)}
            try:
                save_file(whole, work / TENSORS, {"format": "pt"})
            except SafetensorError as error:  # as which a full disk comes
                raise OSError(f"{work / TENSORS}: {error}") from error
            sha256 = hashlib.sha256((work / TENSORS).read_bytes()).hexdigest()
            note = {"base_sha256": self._base_sha256, "sha256": sha256, "number": number, "figures": dict(figures)}
            (work / NOTE).write_text(json.dumps(note, indent=1) + "\n")
        for old in [number for number in self._numbers() if self._is_ours(number)][: -self._kept]:
            shutil.rmtree(self._path(old), ignore_errors=True)
        return final

    def highest(self) -> int:
        """Number of what is there, whoever learned it; 0 for nothing."""
        return max(self._numbers(), default=0)

    def latest(self, names: set[str]) -> tuple[int, dict[str, Tensor]] | None:
        """The last that is whole and was learned from this base: its number and the named tensors."""
        from safetensors.torch import load_file

        for number in reversed(self._numbers()):
            path = self._path(number)
            if not self._is_ours(number):
                logger.warning("%s is no whole version of this drafter, and is left alone", path)
                continue
            try:
                note = json.loads((path / NOTE).read_text())
                if hashlib.sha256((path / TENSORS).read_bytes()).hexdigest() != note["sha256"]:
                    raise ValueError("its tensors are not those that were written")
                tensors = load_file(path / TENSORS)
                return number, {name: tensors[name] for name in names}
            except (OSError, ValueError, KeyError) as error:
                logger.warning("%s is not readable, and is left alone: %s", path, error)
        return None

    def _numbers(self) -> list[int]:
        """Ascending, of whatever has the name of a version."""
        found = self._directory.glob("version-*") if self._directory.is_dir() else []
        names = [path.name.removeprefix("version-") for path in found]
        return sorted(int(name) for name in names if name.isdigit())

    def _is_ours(self, number: int) -> bool:
        try:
            note = json.loads((self._path(number) / NOTE).read_text())
            return bool(note["base_sha256"] == self._base_sha256)
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def _path(self, number: int) -> Path:
        return self._directory / f"version-{number:06d}"


def sampled_digest(checkpoint: Path) -> str:
    """Of a checkpoint's files, by name, size and some of their bytes: tells two apart in a moment, on any node."""
    digest = hashlib.sha256()
    for file in sorted(checkpoint.glob("*")):
        if file.name == "config.json" or file.suffix == ".safetensors":
            size = file.stat().st_size
            digest.update(f"{file.name} {size} ".encode())
            with file.open("rb") as opened:
                for place in range(_SAMPLES):
                    opened.seek(size * place // _SAMPLES)
                    digest.update(opened.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _digest(checkpoint: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(checkpoint.glob("*.safetensors")):
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()
