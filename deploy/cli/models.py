"""What the commands share that work for minutes or hours before they write what they found."""

from __future__ import annotations

import argparse
import errno
import os
from collections.abc import Callable
from pathlib import Path

from outrider.cluster.config import ConfigError
from outrider.deploy.cli import fail


def add_device_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1 (default: a GPU where there is one)")
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16"),
        help="auto: bfloat16 on a GPU and on a CPU with instructions for it",
    )
    parser.add_argument("--verbose", action="store_true", help="the whole traceback when it fails")


def exit_status(command: str, work: Callable[[], None], *, interrupted: str = "interrupted", verbose: bool) -> int:
    """Of a command that does this work: what goes wrong is one line on stderr. interrupted: what that says of it."""
    try:
        work()
    except KeyboardInterrupt:
        return fail(f"{command}: {interrupted}", status=130)
    except (ConfigError, OSError) as error:
        return fail(f"{command}: {error}", verbose=verbose)
    except Exception as error:  # noqa: BLE001 - the operator gets one line, not a stack trace
        return fail(f"{command}: {type(error).__name__}: {error}", verbose=verbose)
    return 0


def check_can_write(option: str, path: Path) -> None:
    """Before the work. A file that is there stays as it is. Raises ConfigError."""
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{option}: {path.parent} is no directory; make it, or write elsewhere")
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        there = path.exists()
        path.open("ab").close()
        if not there:
            path.resolve().unlink()  # a link that leads to it stays
    except OSError as error:
        raise ConfigError(f"{option}: {path} cannot be written ({error.strerror}); write elsewhere") from None
