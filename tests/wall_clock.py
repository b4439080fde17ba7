"""A clock on the wall that a test moves, for processes that it starts: tests/wall_clock.c, preloaded into them."""

from __future__ import annotations

import shutil
import struct
import subprocess
import sys
from pathlib import Path

COMPILER = shutil.which("cc")


class WallClock:
    """It shows the machine's time until it jumps."""

    def __init__(self, directory: Path) -> None:
        self._library, self._offset = directory / "wall_clock.so", directory / "offset"
        source = Path(__file__).with_name("wall_clock.c")
        command = [str(COMPILER), "-shared", "-fPIC", "-O2", "-o", str(self._library), str(source), "-ldl"]
        subprocess.run(command, check=True)
        self._off_s = 0
        self.jump(0)

    @property
    def environment(self) -> dict[str, str]:
        """Of the processes that are to have it, and of their children."""
        return {"LD_PRELOAD": str(self._library), "OUTRIDER_TEST_WALL_CLOCK": str(self._offset)}

    def jump(self, by_s: int) -> None:
        """At once, for all of them."""
        self._off_s += by_s
        # In place: the file is mapped.
        with self._offset.open("r+b" if self._offset.exists() else "wb") as file:
            file.write(struct.pack("q", self._off_s * 10**9))

    def shown(self) -> float:
        """What it shows to them."""
        show = [sys.executable, "-S", "-c", "import time; print(time.time())"]
        shown = subprocess.run(show, env=self.environment, check=True, capture_output=True, text=True)
        return float(shown.stdout)

    def is_of(self, pid: int) -> bool:
        """Whether the process has it."""
        return str(self._library) in Path(f"/proc/{pid}/maps").read_text()
