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
from outrider.cluster.whole_files import UNFINISHED, whole_directory

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

NOTE, TENSORS = "learned.json", "model.safetensors"


class VersionStore:
    def __init__(self, directory: Path, base: Path, kept: int) -> None:
        """base: the checkpoint that learning began with. kept: versions, the latest."""
        self._directory, self._base, self._kept = directory, base, kept
        self._base_sha256 = _digest(base)

    def save(self, number: int, tensors: Mapping[str, Tensor], figures: Mapping[str, Any]) -> Path:
        """Raises OSError."""
        from safetensors.torch import save_file

        final = self._path(number)
        with whole_directory(final) as work:
            for file in self._base.iterdir():
                if file.is_file() and file.suffix not in (".safetensors", ".bin") and "index.json" not in file.name:
                    shutil.copyfile(file, work / file.name)
            whole = {name: tensors.get(name, tensor).contiguous() for name, tensor in tensors_of(self._base)}
            save_file(whole, work / TENSORS, {"format": "pt"})
            sha256 = hashlib.sha256((work / TENSORS).read_bytes()).hexdigest()
            note = {"base_sha256": self._base_sha256, "sha256": sha256, "number": number, "figures": dict(figures)}
            (work / NOTE).write_text(json.dumps(note, indent=1) + "\n")
        for old in sorted(self._complete())[: -self._kept]:
            shutil.rmtree(self._path(old), ignore_errors=True)
        return final

    def latest(self, names: set[str]) -> tuple[int, dict[str, Tensor]] | None:
        """The last that is whole and was learned from this base: its number and the named tensors."""
        from safetensors.torch import load_file

        for number in sorted(self._complete(), reverse=True):
            path = self._path(number)
            try:
                note = json.loads((path / NOTE).read_text())
                if note["base_sha256"] != self._base_sha256:
                    logger.warning("%s was learned from another drafter, and is left alone", path)
                    continue
                if hashlib.sha256((path / TENSORS).read_bytes()).hexdigest() != note["sha256"]:
                    raise ValueError("its tensors are not those that were written")
                tensors = load_file(path / TENSORS)
                return number, {name: tensors[name] for name in names}
            except (OSError, ValueError, KeyError) as error:
                logger.warning("%s is not readable, and is left alone: %s", path, error)
        return None

    def _complete(self) -> list[int]:
        found = self._directory.glob("version-*") if self._directory.is_dir() else []
        names = [path.name for path in found if not path.name.endswith(UNFINISHED) and (path / NOTE).is_file()]
        return [int(name.removeprefix("version-")) for name in names if name.removeprefix("version-").isdigit()]

    def _path(self, number: int) -> Path:
        return self._directory / f"version-{number:06d}"


def _digest(checkpoint: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(checkpoint.glob("*.safetensors")):
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()
