"""Install Outrider into the virtual environment whose Python runs this: ``make setup``.

Standard library only: it runs before anything is installed. It picks the CPU or the GPU build of vLLM, shows
progress while pip works, takes out the torch companions that do not fit the installed torch, and checks that
what serving imports first does import. Exits non-zero with one clear message when something is missing.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
"""Packages vLLM's CPU build pulls in without a version. Built for another torch they break every import of
transformers; serving text needs none of them."""

HEARTBEAT_S = 10.0

_FETCHED = re.compile(r"\s*(?:Downloading|Processing) (\S+)(?: \((\d[^)]*)\))?")
_STAGES = (
    (re.compile(r"Building editable for"), "Building outrider"),
    (re.compile(r"Installing collected packages: (.*)"), "Unpacking {count} packages"),
    (re.compile(r"Successfully installed (.*)"), "Installed"),
)

_HINTS = (
    (
        re.compile(r"No matching distribution found for torch==\S*\+cpu"),
        "The package index offers no CPU build of torch. Point PIP_EXTRA_INDEX_URL at PyTorch's CPU wheel index "
        "(its address is in PyTorch's install instructions) and run `make setup` again.",
    ),
    (
        re.compile(r"No matching distribution found for vllm"),
        "The package index offers no vLLM 0.32 for this Python and platform: CPython 3.11 to 3.14 on Linux is needed.",
    ),
    (
        re.compile(r"requires a different Python"),
        f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}. "
        "Remove the environment and set PYTHON=/path/to/python3.",
    ),
    (
        re.compile(r"No space left on device|Errno 28"),
        "The disk is full. The environment needs about 5 GB on CPU and 15 GB on GPU, and pip as much again in TMPDIR.",
    ),
    (
        re.compile(r"NewConnectionError|Temporary failure in name resolution|ReadTimeout|Connection refused"),
        "The package index cannot be reached. Check the network, or pip's own settings (`pip config list`).",
    ),
)


class SetupError(RuntimeError):
    """Setting up failed; the message says what to do."""


def detect_accelerator() -> str:
    """``gpu`` where nvidia-smi lists a device, else ``cpu``."""
    if shutil.which("nvidia-smi") is None:
        return "cpu"
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return "cpu"
    return "gpu" if listing.returncode == 0 and "GPU" in listing.stdout else "cpu"


class Progress:
    """Lines with the time since the start; repeats the last one while nothing else is printed."""

    def __init__(self) -> None:
        self._start = self._last_print = time.monotonic()
        self._doing = ""
        self._stop = threading.Event()
        threading.Thread(target=self._beat, daemon=True).start()

    def say(self, text: str) -> None:
        self._doing = text
        self._print(text)

    def close(self) -> None:
        self._stop.set()

    def _print(self, text: str) -> None:
        self._last_print = time.monotonic()
        print(f"[{self._last_print - self._start:4.0f} s] {text}", flush=True)

    def _beat(self) -> None:
        while not self._stop.wait(1.0):
            if time.monotonic() - self._last_print >= HEARTBEAT_S:
                self._print(f"… {self._doing}")


def run_pip(arguments: list[str], log: Path, progress: Progress) -> None:
    """Run pip with its whole output in ``log`` and the lines that tell progress on the screen.

    Raises SetupError with a hint when the failure is a known one.
    """
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    with log.open("w") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        assert process.stdout is not None
        for line in process.stdout:
            out.write(line)
            if text := _summary(line):
                progress.say(text)
        code = process.wait()
    if code != 0:
        raise SetupError(_explain(log.read_text(), code, log))


def _summary(line: str) -> str | None:
    """What a line of pip's output tells a person who waits; None: nothing."""
    if fetched := _FETCHED.match(line):
        name, size = Path(fetched[1]).name, fetched[2]
        return f"Fetching {name}" + (f" ({size})" if size else "")
    for pattern, text in _STAGES:
        if found := pattern.search(line):
            return text.format(count=found[1].count(",") + 1 if found.groups() else 1)
    return None


def _explain(output: str, code: int, log: Path) -> str:
    for pattern, hint in _HINTS:
        if pattern.search(output):
            return f"{hint}\n(pip's own output: {log})"
    return f"pip failed with exit code {code}; the end of {log} says:\n{output[-2000:]}"


def remove_broken_companions(progress: Progress, log: Path) -> list[str]:
    """Uninstall each torch companion that cannot be imported with the installed torch. Returns their names."""
    installed = [name for name in COMPANIONS if importlib.util.find_spec(name) is not None]
    if not installed:
        return []
    progress.say(f"Checking {', '.join(installed)} against the installed torch")
    # Every one in a process of its own, since a failed import leaves torch half registered.
    checks = {
        name: subprocess.Popen(
            [sys.executable, "-c", f"import torch, {name}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for name in installed
    }
    broken = [name for name, check in checks.items() if check.wait() != 0]
    if broken:
        progress.say(f"Removing {', '.join(broken)}: built for another torch, and not needed to serve text")
        run_pip(["uninstall", "--yes", *broken], log, progress)
    return broken


def verify(progress: Progress) -> None:
    """Import what serving imports. Raises SetupError naming the package that does not work.

    What is imported here is byte-compiled for every process of every server: without it each of three processes that
    load vLLM compiles it anew, which takes more than twice the processor time of an import.
    """
    checks = {
        "torch": "import torch",
        "transformers": "from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel",
        "vllm": "from vllm.platforms import current_platform as p; assert p.is_cpu() or p.is_cuda(), p.device_type",
        "ray": "import ray.serve",
        "outrider": "import outrider.actors.serving.replica, outrider.actors.vllm_seam.target_engine, "
        "outrider.actors.vllm_seam.target_worker, outrider.v1.generation_pb2_grpc",
    }
    progress.say(f"Checking that {', '.join(checks)} work together")
    # One process for all, since they load each other. The last name it prints is the one that failed.
    code = "\n".join(f"print({name!r}, flush=True)\n{check}" for name, check in checks.items())
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
        cwd=sys.prefix,  # not the source tree, so that an installation that misses our packages is noticed
        capture_output=True,
        text=True,
    )
    if result.returncode != 0:
        name = [line for line in result.stdout.splitlines() if line in checks][-1]
        last = (result.stderr.strip().splitlines() or [f"exit code {result.returncode}"])[-1]
        raise SetupError(
            f'{name} is installed but does not work here: {last}\n(try: {sys.executable} -c "{checks[name]}")'
        )


def main() -> int:
    parser = argparse.ArgumentParser(description="Install Outrider into this virtual environment.")
    parser.add_argument("--accelerator", choices=("cpu", "gpu"), help="default: gpu where nvidia-smi lists one")
    accelerator = parser.parse_args().accelerator or detect_accelerator()
    if sys.prefix == sys.base_prefix:
        print("outrider: run this with a virtual environment's Python; `make setup` does", file=sys.stderr)
        return 1
    progress = Progress()
    log = Path(sys.prefix) / "outrider-setup.log"
    try:
        progress.say(f"Installing Outrider for {accelerator} into {sys.prefix} (1 to 5 minutes; log: {log})")
        # Without --no-compile pip byte-compiles tens of thousands of files of which serving imports a few.
        run_pip(["install", "--no-compile", "--editable", f".[{accelerator},dev]"], log, progress)
        remove_broken_companions(progress, log.with_suffix(".uninstall.log"))
        verify(progress)
    except SetupError as error:
        print(f"outrider: setup failed. {error}", file=sys.stderr)
        return 1
    finally:
        progress.close()
    progress.say("Ready")
    return 0


if __name__ == "__main__":
    sys.exit(main())
