"""Versions on disk: whole checkpoints, which ``drafter.model`` takes, beside a note of what each was learned from."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.actors.learning.draft_models import tensors_of
from outrider.cluster.whole_files import UNFINISHED, whole_directory, whole_file

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

NOTE, TENSORS = "learned.json", "model.safetensors"
LEFT = "left.json"
"""Beside the versions: for each time that somebody went back, which base, from which number, and under which one that
serves since. Versions between the two do not serve again."""

_STALE_S = 3600.0
"""A version that has been unfinished for so long is of a trainer that died while it wrote."""

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
        self._sweep()
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

    def leave(self, number: int, serving: int) -> None:
        """Somebody went back to a version, which serves under another number since: whatever becomes of that on disk,
        those between the two are not the latest any more. Raises OSError."""
        entries = [*self._left(), {"base_sha256": self._base_sha256, "number": number, "serving": serving}]
        self._directory.mkdir(parents=True, exist_ok=True)
        with whole_file(self._directory / LEFT) as work:
            work.write_text(json.dumps(entries) + "\n")

    def highest(self) -> int:
        """Number of what is there or was left, whoever learned it; 0 for nothing."""
        return max([*self._numbers(), *(entry["serving"] for entry in self._left())], default=0)

    def latest(self, names: set[str]) -> tuple[int, dict[str, Tensor]] | None:
        """The last that is whole, was learned from this base and was not left: its number and the named tensors."""
        from safetensors.torch import load_file

        ways = [(entry["number"], entry["serving"]) for entry in self._left() if self._is_of_base(entry)]
        for number in reversed(self._numbers()):
            path = self._path(number)
            if any(back < number < serving for back, serving in ways):
                continue
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

    def _left(self) -> list[dict[str, Any]]:
        try:
            entries = json.loads((self._directory / LEFT).read_text())
            return [entry for entry in entries if int(entry["number"]) < int(entry["serving"])]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("%s is not readable, and is left alone: %s", self._directory / LEFT, error)
            return []

    def _sweep(self) -> None:
        for path in self._directory.glob(f"version-*{UNFINISHED}"):
            try:
                if time.time() - path.stat().st_mtime > _STALE_S:
                    shutil.rmtree(path, ignore_errors=True)
            except OSError:  # somebody else's, who is done with it
                continue

    def _is_of_base(self, note: Mapping[str, Any]) -> bool:
        return bool(note["base_sha256"] == self._base_sha256)

    def _is_ours(self, number: int) -> bool:
        try:
            return self._is_of_base(json.loads((self._path(number) / NOTE).read_text()))
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
