"""Directories and files that are there as a whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

UNFINISHED = ".unfinished"


@contextmanager
def whole_directory(final: Path) -> Iterator[Path]:
    """An empty directory to fill, which takes the place of ``final`` when the block ends without an exception."""
    work = final.with_name(final.name + UNFINISHED)
    shutil.rmtree(work, ignore_errors=True)  # of a run that was interrupted
    work.mkdir(parents=True)
    try:
        yield work
        for file in work.iterdir():
            _to_disk(file)
        _to_disk(work)
        shutil.rmtree(final, ignore_errors=True)
        work.replace(final)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)  # on a full disk it would be in the way of everything to come
        raise
    _to_disk(final.parent)


@contextmanager
def whole_file(final: Path) -> Iterator[Path]:
    """A path to write, which takes the place of ``final`` when the block ends without an exception."""
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
