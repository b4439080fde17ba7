"""Files that hold secrets, or decide about them: who may touch them, and what is in them now.

A server reads them at its start, where a mistake ends it, and again when they change, where a mistake must not: what
was read before stays, a log line says so once, and ``problem`` does until it is mended.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from outrider.cluster.config_section import ConfigError

logger = logging.getLogger("ray.serve.outrider.access")

LOOK_EVERY_S = 1.0
"""How often a file is looked at, at most."""

_OTHERS_MAY = stat.S_IWGRP | stat.S_IRWXO

Loaded = TypeVar("Loaded")


def read_file(field: str, path: str | Path, *, private: bool = False) -> bytes:
    """private: only the owner may change it, and nobody but its owner and group may read it.

    Raises ConfigError with the field and what to do.
    """
    path = Path(path).expanduser()
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise ConfigError(f"{field}: {path} is no regular file; name one")
            if private and mode & _OTHERS_MAY:
                raise ConfigError(
                    f"{field}: {path} may be read or changed by others (mode {stat.S_IMODE(mode):04o}); "
                    f"run: chmod 600 {path}"
                )
            return file.read()
    except FileNotFoundError:
        raise ConfigError(f"{field}: {path}: no such file; name one that exists, or leave the key out") from None
    except OSError as error:
        who = f"user {os.getuid()}"
        fix = "let that user read it" if isinstance(error, PermissionError) else "name a file"
        raise ConfigError(f"{field}: {path} cannot be read by {who} ({error.strerror}); {fix}") from None


class Reloading(Generic[Loaded]):
    """What is in some files, now. `current` may be called by any thread. It looks at the files, and reads those that
    have changed, unless a thread of its own does so (`watch`).

    load: reads and checks all of it; raises ConfigError. paths: the files that it reads.
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        load: Callable[[], Loaded],
        *,
        clock: Callable[[], float] = time.monotonic,
        look_every_s: float = LOOK_EVERY_S,
        on_look: Callable[[Reloading[Loaded]], object] = lambda files: None,
    ) -> None:
        """on_look: called behind each look that found a change. Raises what load raises."""
        self._paths = [Path(path).expanduser() for path in paths]
        self._load, self._clock, self._look_every_s, self._on_look = load, clock, look_every_s, on_look
        self._lock = threading.Lock()
        self._seen = self._signature()
        self._now = (1, load())
        self._looked_s = clock()
        self._watched = False
        self.problem: str | None = None
        """Why the files as they are now cannot be used; None: they are in use."""

        self.failures = 0
        """Changes that could not be used, since the start."""

    def watch(self) -> None:
        """From now on a thread looks, whether anybody asks or not, and nobody who does waits for what is read."""
        self._watched = True
        threading.Thread(target=_watch, args=(weakref.ref(self),), name="access-files", daemon=True).start()

    def current(self) -> Loaded:
        """What the files hold, or held when they could last be used."""
        return self.versioned()[1]

    def versioned(self) -> tuple[int, Loaded]:
        """With a number that is another for every content."""
        if self._watched:
            return self._now
        with self._lock:
            if self._clock() - self._looked_s >= self._look_every_s:
                self._looked_s = self._clock()
                self._look()
            return self._now

    def _look(self) -> None:
        """Whatever goes wrong, the next look comes: a key that is revoked must be out."""
        try:
            self._reload()
        except Exception:
            logger.exception("looking at %s failed", ", ".join(map(str, self._paths)))

    def _reload(self) -> None:
        """What has changed."""
        seen = self._signature()  # before reading: what is written meanwhile is a change the next time
        if seen == self._seen:
            return
        self._seen = seen
        try:
            value = self._load()
        except Exception as error:  # noqa: BLE001 - whatever it is, the next change is looked at again
            self.failures += 1
            self.problem = str(error) if isinstance(error, ConfigError) else type(error).__name__
            logger.error("not reloaded, what was read before stays in use: %s", self.problem)
            self._on_look(self)
            return
        self._now, self.problem = (self._now[0] + 1, value), None
        self._on_look(self)
        logger.info("reloaded %s", ", ".join(str(path) for path in self._paths))

    def _signature(self) -> list[tuple[int, ...] | None]:
        return [_signature_of(path) for path in self._paths]


def _watch(watched: weakref.ref[Reloading[Any]]) -> None:
    """For as long as somebody has it."""
    while (files := watched()) is not None:
        pause_s = files._look_every_s
        files._look()
        del files
        time.sleep(pause_s)


def _signature_of(path: Path) -> tuple[int, ...] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_mtime_ns, found.st_size, found.st_ino, found.st_dev, found.st_mode)
