"""Writes directories and files so that they exist as a whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

UNFINISHED = ".unfinished"


@contextmanager
def whole_directory(final: Path) -> Iterator[Path]:
    """Yields an empty directory, which replaces ``final`` when the block ends without an exception."""
    work = final.with_name(final.name + UNFINISHED)
    shutil.rmtree(work, ignore_errors=True)  # left by an interrupted run
    work.mkdir(parents=True)
    try:
        yield work
        for file in work.iterdir():
            _to_disk(file)
        _to_disk(work)
        shutil.rmtree(final, ignore_errors=True)
        work.replace(final)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)  # it would take room on a full disk
        raise
    _to_disk(final.parent)


@contextmanager
def whole_file(final: Path) -> Iterator[Path]:
    """Yields a path to write, which replaces ``final`` when the block ends without an exception."""
    work = final.with_name(final.name + UNFINISHED)
    try:
        yield work
        _to_disk(work)
        work.replace(final)
    except BaseException:
        work.unlink(missing_ok=True)
        raise


def _to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
