"""``python tests/run_parts.py [--only PART] [pytest's arguments]``: the suite in its two parts, one after the other.

Unit tests share nothing and run on two cores at once. Integration, fault and security tests start servers of some
gigabytes, of which two at once keep two cores busy: each half of them has a cluster of its own, in which deployments
follow one another (tests/conftest.py). What the first half prints is passed on as it comes, what the second prints
after that. The second part runs whatever the first came to; the last lines say how each went, and the exit status is 0
only when all passed. A part may be empty, where the arguments select tests of the other alone. Standard library only.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading

SERVED = ["tests/integration", "tests/faults", "tests/security"]
PARTS = {
    "unit": {"unit tests": ["tests/unit", "-n", "2", "--dist", "worksteal"]},
    "served": {"served tests, half 1": [*SERVED, "--half", "1"], "served tests, half 2": [*SERVED, "--half", "2"]},
}
"""Pytest processes that run at once, by part."""

NO_TESTS = 5
"""pytest's exit status when nothing was selected."""

SUMMARY = re.compile(r"^=+ (?P<summary>.*\d.* in [\d.]+s.*?) =+$", re.MULTILINE)
COLOUR = re.compile(r"\x1b\[[\d;]*m")
TAIL = 65536


class Run:
    """Runs one pytest process, reads what it prints as it comes, and passes it on from the time it is asked for."""

    def __init__(self, arguments: list[str]) -> None:
        colour = ["--color=yes"] if sys.stdout.isatty() else []
        self._process = subprocess.Popen([sys.executable, "-m", "pytest", *arguments, *colour], stdout=subprocess.PIPE)
        self._kept = b""
        self._tail = b""
        self._shown = False
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait(self) -> tuple[int, str]:
        """Pass on all that pytest prints. Returns its exit status and its last line."""
        with self._lock:
            self._shown = True
            _show(self._kept)
        self._reader.join()
        status = self._process.wait()
        found = SUMMARY.findall(COLOUR.sub("", self._tail.decode(errors="replace")))
        return status, found[-1] if found else f"pytest ended with status {status}"

    def _read(self) -> None:
        assert self._process.stdout is not None
        while data := os.read(self._process.stdout.fileno(), 65536):
            with self._lock:
                self._tail = (self._tail + data)[-TAIL:]
                if self._shown:
                    _show(data)
                else:
                    self._kept += data


def _show(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def run(jobs: dict[str, list[str]], arguments: list[str]) -> dict[str, tuple[int, str]]:
    """Run all jobs at once. Returns the exit status and the last line of each, by name."""
    runs = {name: Run([*own, *arguments]) for name, own in jobs.items()}
    return {name: each.wait() for name, each in runs.items()}


def main(arguments: list[str]) -> int:
    parts = list(PARTS)
    if arguments[:1] == ["--only"]:
        parts, arguments = [arguments[1]], arguments[2:]
    results: dict[str, tuple[int, str]] = {}
    for part in parts:
        results |= run(PARTS[part], arguments)
    print()
    for name, (_, summary) in results.items():
        print(f"{name + ':':22} {summary}")
    statuses = {status for status, _ in results.values()}
    if len(statuses) > 1:
        statuses.discard(NO_TESTS)
    return next((abs(status) for status in statuses if status), 0)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
