"""``python tests/run_parts.py [--only PART] [pytest's arguments]``: the suite in its two parts, one after the other.

Unit tests share nothing and run on two cores at once. Integration, fault and security tests have the machine to
themselves, one at a time, since each of their servers takes both cores and some gigabytes. The second part runs
whatever the first came to; the last lines say how each went, and the exit status is 0 only when both passed. A part may
be empty, where the arguments select tests of the other alone. Standard library only.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

PARTS = {
    "unit": ["tests/unit", "-n", "2", "--dist", "worksteal"],
    "served": ["tests/integration", "tests/faults", "tests/security"],
}
NO_TESTS = 5
"""pytest's exit status when nothing was selected."""

SUMMARY = re.compile(r"^=+ (?P<summary>.*\d.* in [\d.]+s.*?) =+$", re.MULTILINE)
COLOUR = re.compile(r"\x1b\[[\d;]*m")
TAIL = 65536


def run(arguments: list[str]) -> tuple[int, str]:
    """pytest's exit status and its last line. What it prints is passed on as it comes."""
    colour = ["--color=yes"] if sys.stdout.isatty() else []
    process = subprocess.Popen([sys.executable, "-m", "pytest", *arguments, *colour], stdout=subprocess.PIPE)
    assert process.stdout is not None
    tail = b""
    while data := os.read(process.stdout.fileno(), 65536):
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        tail = (tail + data)[-TAIL:]
    status = process.wait()
    found = SUMMARY.findall(COLOUR.sub("", tail.decode(errors="replace")))
    return status, found[-1] if found else f"pytest ended with status {status}"


def main(arguments: list[str]) -> int:
    parts = list(PARTS)
    if arguments[:1] == ["--only"]:
        parts, arguments = [arguments[1]], arguments[2:]
    results = {part: run([*PARTS[part], *arguments]) for part in parts}
    print()
    for part, (_, summary) in results.items():
        print(f"{part + ' tests:':14} {summary}")
    statuses = {status for status, _ in results.values()}
    if len(statuses) > 1:
        statuses.discard(NO_TESTS)
    return next((abs(status) for status in statuses if status), 0)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
