"""Install Outrider into the virtual environment whose Python runs this: ``make setup``.

Standard library only: it runs before anything is installed. It picks the CPU or the GPU build of vLLM, lets uv install
it from where pip is told to look, takes out the torch companions that do not fit the installed torch, and checks that
what serving imports first does import. Exits non-zero with one clear message when something is missing.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import os
import re
import shlex
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

UV = "uv==0.13.9"
"""Resolves, fetches and unpacks in a fifth of pip's time: 20 s here for 107."""

PIP_SETTINGS = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "trusted-host": "UV_INSECURE_HOST",
    "cert": "SSL_CERT_FILE",
    "proxy": "ALL_PROXY",
    "timeout": "UV_HTTP_TIMEOUT",
    "default-timeout": "UV_HTTP_TIMEOUT",
}
"""uv reads its own variables and none of pip's: what the latter is told of places, in the words of the former."""

HEARTBEAT_S = 10.0

_TOLD = re.compile(r"\s*(Resolved|Downloading|Building|Prepared|Installed|Uninstalled) .*")

_HINTS = (
    (
        re.compile(r"no version of torch==\S*\+cpu"),
        "The package index offers no CPU build of torch. Set UV_TORCH_BACKEND=cpu, or point PIP_EXTRA_INDEX_URL at "
        "PyTorch's CPU wheel index (its address is in PyTorch's install instructions), and run `make setup` again.",
    ),
    (
        re.compile(r"no versions? of vllm|vllm\S* was not found|vllm\S* has no wheels"),
        "The package index offers no vLLM 0.32 for this Python and platform: CPython 3.11 to 3.14 on Linux is needed.",
    ),
    (
        re.compile(r"does not satisfy Python>="),
        f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}. "
        "Remove the environment and set PYTHON=/path/to/python3.",
    ),
    (
        re.compile(r"No space left on device|Errno 28"),
        "The disk is full. The environment needs about 5 GB on CPU and 9 GB on GPU, "
        "and as much again where uv keeps its cache (UV_CACHE_DIR) if that is on another disk.",
    ),
    (
        re.compile(
            r"NewConnectionError|Temporary failure in name resolution|ReadTimeout|error sending request|timed out"
        ),
        "The package index cannot be reached. Check the network, or pip's own settings (`pip config list`).",
    ),
)


class SetupError(RuntimeError):
    """Setting up failed; the message says what to do."""


def refused_place() -> str | None:
    """Why Ray can start no engine with this Python; None: it can."""
    if shlex.quote(sys.executable) == sys.executable:
        return None
    return (
        f"python: {sys.executable}: Ray starts engines through a shell, which takes this path apart; make the "
        "environment in another place: make VENV=/path/without/spaces, with this target and every later one"
    )


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


def uv_settings(pip_settings: str) -> dict[str, str]:
    """uv's environment for the same places that pip looks at. pip_settings: as ``pip config list`` prints them.

    A command's section overrides the global one, and the environment both, as for pip itself.
    """
    found: dict[str, str] = {}
    lines = [line.partition("=") for line in pip_settings.splitlines() if "=" in line]
    for section in ("global", "install", ":env:"):
        for key, _, value in lines:
            of, _, name = key.partition(".")
            if of == section and name in PIP_SETTINGS:
                found[PIP_SETTINGS[name]] = " ".join(str(ast.literal_eval(value)).split())
    if places := found.get("UV_FIND_LINKS"):
        found["UV_FIND_LINKS"] = places.replace(" ", ",")  # the one list of uv's that has commas
    # Of several indexes pip takes the best version that any has, uv by default the first index with the name.
    return {"UV_INDEX_STRATEGY": "unsafe-best-match", **found}


class Installer:
    """uv, on the screen as the lines that tell progress, with all its output in ``log``."""

    def __init__(self, log: Path, progress: Progress) -> None:
        """Installs uv itself. Raises SetupError."""
        self._log, self._progress = log, progress
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
        log.write_text("")
        self._run([*pip, "install", "--quiet", UV], dict(os.environ))
        listed = subprocess.run([*pip, "config", "list"], capture_output=True, text=True)
        self._environment = {**uv_settings(listed.stdout), **os.environ}  # what uv is told itself stands

    def run(self, *arguments: str) -> None:
        """``uv pip`` with these arguments on this environment. Raises SetupError."""
        command, *rest = arguments
        self._run([sys.executable, "-m", "uv", "pip", command, "--python", sys.executable, *rest], self._environment)

    def _run(self, command: list[str], environment: dict[str, str]) -> None:
        """Raises SetupError with a hint when the failure is a known one."""
        output = []
        with self._log.open("a") as out:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
            assert process.stdout is not None
            for line in process.stdout:
                out.write(line)
                output.append(line)
                if _TOLD.fullmatch(line.rstrip()):
                    self._progress.say(line.strip())
            code = process.wait()
        if code != 0:
            raise SetupError(explain("".join(output), code, self._log))


def explain(output: str, code: int, log: Path) -> str:
    """What to do about a failed installation."""
    for pattern, hint in _HINTS:
        if pattern.search(output):
            return f"{hint}\n(the installer's own output: {log})"
    return f"the installer failed with exit code {code}; the end of {log} says:\n{output[-2000:]}"


def remove_broken_companions(progress: Progress, installer: Installer) -> list[str]:
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
        installer.run("uninstall", *broken)
    return broken


def verify(progress: Progress, accelerator: str) -> None:
    """Import what serving imports. Raises SetupError naming the package that does not work.

    What is imported here is byte-compiled for every process of every server: without it each of three processes that
    load vLLM compiles it anew, which takes more than twice the processor time of an import.
    """
    checks = {
        "torch": "import torch",
        "transformers": "from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel",
        "vllm": "from vllm.platforms import current_platform as p; assert p.is_cpu() or p.is_cuda(), p.device_type",
        **({"flashinfer": "import flashinfer"} if accelerator == "gpu" else {}),  # by which vLLM chooses attention
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


def requirements(accelerator: str, *, serving: bool) -> list[str]:
    """What uv is to install. serving: a copy with what a server needs, without the tools of development."""
    return [f".[{accelerator},otel]"] if serving else ["--editable", f".[{accelerator},dev]"]


def main() -> int:
    parser = argparse.ArgumentParser(description="Install Outrider into this virtual environment.")
    parser.add_argument("--accelerator", choices=("cpu", "gpu"), help="default: gpu where nvidia-smi lists one")
    parser.add_argument("--serving", action="store_true", help="for an image: no development tools, not editable")
    arguments = parser.parse_args()
    accelerator = arguments.accelerator or detect_accelerator()
    if refusal := refused_place():
        print(f"outrider: {refusal}", file=sys.stderr)
        return 1
    if sys.prefix == sys.base_prefix:
        print("outrider: run this with a virtual environment's Python; `make setup` does", file=sys.stderr)
        return 1
    progress = Progress()
    log = Path(sys.prefix) / "outrider-setup.log"
    try:
        progress.say(f"Installing Outrider for {accelerator} into {sys.prefix} (1 to 3 minutes; log: {log})")
        installer = Installer(log, progress)
        installer.run("install", *requirements(accelerator, serving=arguments.serving))
        remove_broken_companions(progress, installer)
        if accelerator == "gpu" and detect_accelerator() == "cpu":
            progress.say("Not tried out, since no GPU is here: `make test-cuda-build` does what can be done without")
        else:
            verify(progress, accelerator)
    except SetupError as error:
        print(f"outrider: setup failed. {error}", file=sys.stderr)
        return 1
    finally:
        progress.close()
    progress.say("Ready")
    return 0


if __name__ == "__main__":
    sys.exit(main())
