"""Shows what can be shown of the CUDA path without a GPU: `make test-cuda-build`.

Installs the `gpu` and `dev` extras into an environment of its own and runs stages in it, as many at once as there are
cores. Needs a C compiler, some 9 GB of disk and, the first time, a few minutes. Standard library only: it runs before
anything is installed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
NEEDED_GB = 12.0
"""Free disk that is needed: the environment, and as much again for a while as its largest packages."""

STUBS = {"driver_stub.c": "libcuda.so.1", "runtime_stub.c": "libcudart_stub.so"}


@dataclass(frozen=True)
class Stage:
    name: str
    module: str
    arguments: tuple[str, ...] = ()
    interpreted: bool = False
    """Triton interprets kernels from its import on."""


STAGES = [
    Stage("target steps", "tests.cuda_build.target_steps", ("{model}",)),
    Stage("drafter steps", "tests.cuda_build.draft_steps", ("{model}",)),
    Stage("imports", "tests.cuda_build.imports"),
    *(Stage(f"kernels for sm_{each}", "tests.cuda_build.compiled_kernels", (each,)) for each in ("80", "90", "100")),
    Stage("kernels interpreted", "tests.unit.verification.triton_comparison", interpreted=True),
]
"""The longest first."""


class Environment:
    def __init__(self, folder: Path) -> None:
        self.folder, self.python = folder, folder / "bin/python"
        self.logs, self._stamp = folder / "cuda-build", folder / "cuda-build/installed"

    def _wanted(self) -> str:
        described = (ROOT / "pyproject.toml").read_bytes() + (ROOT / "deploy/setup_environment.py").read_bytes()
        return hashlib.sha256(described).hexdigest()

    def is_installed(self) -> bool:
        return self._stamp.exists() and self._stamp.read_text() == self._wanted()

    def install(self) -> None:
        """Raises CalledProcessError."""
        if not self.python.exists():
            subprocess.run([sys.executable, "-m", "venv", self.folder], check=True)
        install = [self.python, ROOT / "deploy/setup_environment.py", "--accelerator", "gpu"]
        subprocess.run(install, check=True, env=_without_bytecode_ban())
        subprocess.run([self.python, "-m", "uv", "pip", "check", "--python", self.python], check=True)
        self.logs.mkdir(exist_ok=True)
        self._stamp.write_text(self._wanted())

    def build_stubs(self) -> None:
        """Raises CalledProcessError."""
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            sys.exit("make test-cuda-build: needs a C compiler (cc or gcc), as Triton does on a GPU")
        for source, library in STUBS.items():
            command = [compiler, "-shared", "-fPIC", "-Wno-builtin-declaration-mismatch", "-o", self.logs / library]
            subprocess.run([*command, HERE / source], check=True)

    def run(self, stage: Stage, model: Path) -> tuple[Stage, int, float, str]:
        """Returns the exit status, seconds, and what it printed to stdout; stderr goes to its log."""
        environment = _without_bytecode_ban() | {
            "PYTHONPATH": str(ROOT),
            "LD_PRELOAD": str(self.logs / "libcudart_stub.so"),
            "LD_LIBRARY_PATH": str(self.logs),
            "OMP_NUM_THREADS": "1",
        }
        if stage.interpreted:
            environment["TRITON_INTERPRET"] = "1"
        command = [self.python, "-m", stage.module, *(each.format(model=model) for each in stage.arguments)]
        started = time.monotonic()
        print(f"… {stage.name}", flush=True)
        with self.log(stage).open("w") as log:
            done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)
        return stage, done.returncode, time.monotonic() - started, done.stdout

    def log(self, stage: Stage) -> Path:
        return self.logs / f"{stage.name.replace(' ', '-')}.log"


def _without_bytecode_ban() -> dict[str, str]:
    """Every stage imports thousands of modules, and would compile them anew."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def shown(line: str) -> str:
    """A line of a stage, shortened where it is JSON."""
    if not line.startswith("{"):
        return line
    report = json.loads(line)
    counts = {name: count for name, count in report["launches"].items() if not name.startswith("vllm::")}
    return (
        f"{report['variant']}: {report['tokens']} tokens, {len(report['problems'])} wrong; launches: "
        + ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
        + "".join(f"\n    {problem}" for problem in report["problems"])
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cuda_build", description=__doc__)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv-cuda", help="the environment's folder")
    parser.add_argument("--only", default="", help="stages whose name contains this")
    arguments = parser.parse_args()
    environment, started = Environment(arguments.venv.resolve()), time.monotonic()
    free_gb = shutil.disk_usage(ROOT).free / 1e9
    if not environment.is_installed():
        if free_gb < NEEDED_GB:
            print(f"SKIPPED: make test-cuda-build needs {NEEDED_GB:g} GB of free disk, here are {free_gb:.1f} GB")
            return 0
        environment.install()
    environment.logs.mkdir(exist_ok=True)
    environment.build_stubs()
    installed_s, model = time.monotonic() - started, environment.logs / "model"
    build = (
        "import sys, pathlib, tests.support.models.tiny_models as t;"
        "t.build_tiny_llama(pathlib.Path(sys.argv[1]), head_dim=64)"
    )
    subprocess.run([environment.python, "-c", build, model], cwd=ROOT, check=True, stderr=subprocess.DEVNULL)
    stages = [stage for stage in STAGES if arguments.only in stage.name]
    rows, failures = [("installation", "ok", installed_s)], 0
    with ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), 4)) as pool:
        for future in [pool.submit(environment.run, stage, model) for stage in stages]:
            stage, status, seconds, printed = future.result()
            print(f"\n{stage.name}")
            print("\n".join(f"  {shown(line)}" for line in printed.splitlines()), flush=True)
            rows.append((stage.name, "ok" if status == 0 else "FAILED", seconds))
            if status:
                failures += 1
                print("\n".join(environment.log(stage).read_text(errors="replace").splitlines()[-25:]), flush=True)
    print("\n".join(["", *(f"{name:36} {result:8} {seconds:5.0f} s" for name, result, seconds in rows)]))
    size = sum(
        path.stat().st_size for path in environment.folder.rglob("*") if not path.is_symlink() and path.is_file()
    )
    print(f"{time.monotonic() - started:.0f} s, {size / 1e9:.1f} GB in {arguments.venv}; logs in {environment.logs}")
    print(f"{len(rows) - 1 - failures} passed, {failures} failed")
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
