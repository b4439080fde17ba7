"""``python -m tests.gpu [--need-gpu] [pytest's arguments]`` runs the GPU tests in parts and writes a report.

Kernels and links need a checkout, PyTorch, Triton, NumPy and pytest; neither vLLM nor Ray, nor an installation. They
are the tests of this folder, and those of the other suites that import no more than that, by the lists below. Engines
need an environment with vLLM's GPU build and Ray. Each part is a pytest process of its own and runs whatever the former
came to. On a GPU and without arguments, verification's times follow. All that the parts print, versions and the table
at the end are also in gpu-report.txt, in the current directory. The exit status is 1 where a part failed.

--need-gpu: ends at once where PyTorch sees no GPU; otherwise tests that need one are skipped.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path

import torch

from outrider.cluster.installed import installed_version

ROOT = Path(__file__).parents[2]
NO_TESTS = 5
"""pytest's exit status where none was selected."""

PACKAGES = ("torch", "triton", "vllm", "ray", "flashinfer-python", "transformers", "numpy", "pytest")
COMMANDS = (
    ("nvidia-smi", "--query-gpu=index,name,driver_version,memory.total,compute_cap,mig.mode.current", "--format=csv"),
    ("nvidia-smi", "topo", "-m"),
    ("git", "rev-parse", "HEAD"),
)
"""What the report begins with."""

GRACE_S = 60.0
"""Between the interruption of a part that takes too long, which lets it end its engines, and its end."""

HERE, ENGINES = "tests/gpu", "tests/gpu/engines"
LIMIT_S = {"kernels": 2400.0, "links": 1200.0, "engines": 5400.0, "times": 600.0}
"""After which a part is ended. About four times what it is expected to take."""

LINKS = (
    "tests/gpu/test_nccl.py",
    "tests/unit/test_frame.py",
    "tests/unit/messages",
    "tests/unit/link",
    "tests/integration/test_link_processes.py",
    "tests/integration/test_link_rendezvous.py",
)
"""Frames, messages, and links over every transport, NCCL too."""

SHARED = (
    "tests/unit/test_vocabulary.py",
    "tests/unit/test_round_origins.py",
    "tests/unit/length",
    "tests/unit/verification",
    "tests/unit/drafter/test_draft_draw.py",
    "tests/unit/drafter/test_draft_loop.py",
    "tests/unit/drafter/test_draft_model.py",
    "tests/unit/drafter/test_draft_vocabulary.py",
    "tests/unit/drafter/test_ngram.py",
    "tests/unit/drafter/test_reading.py",
    "tests/unit/drafter/test_lookup_drafters.py",
    "tests/unit/drafter/test_suffix_index.py",
    "tests/unit/drafter/test_worth.py",
    "tests/unit/learning/test_loss.py",
    "tests/unit/learning/test_replay.py",
)
"""Files of the other suites: draft loop, cut head, draft lengths, verification, training."""

CONFIGURED = ("tests/unit/round",)
"""Needs what reads configurations as well."""

READS_CONFIGURATIONS = ("pydantic", "yaml", "jsonschema")


def run(command: list[str], limit_s: float, report: Path) -> str:
    """Runs a command, and appends what it prints to the report. Returns how it ended; empty: well."""
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    reader = threading.Thread(target=pass_on, args=(process, report), daemon=True)
    reader.start()
    problem = ""
    try:
        process.wait(limit_s)
    except (subprocess.TimeoutExpired, KeyboardInterrupt) as error:
        problem = f"ended after {limit_s:g} s" if isinstance(error, subprocess.TimeoutExpired) else "interrupted"
        process.send_signal(signal.SIGINT)
        try:
            process.wait(GRACE_S)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    reader.join(5.0)  # a process that is left behind may hold the pipe
    return problem or (f"status {process.returncode}" if process.returncode not in (0, NO_TESTS) else "")


def pass_on(process: subprocess.Popen[bytes], report: Path) -> None:
    assert process.stdout is not None
    with report.open("ab") as file:
        while data := os.read(process.stdout.fileno(), 65536):
            file.write(data)
            file.flush()
            os.write(sys.stdout.fileno(), data)


def main(arguments: list[str]) -> int:
    report = Path("gpu-report.txt").absolute()
    sees_gpu = torch.cuda.is_available()
    if "--need-gpu" in arguments:
        if not sees_gpu:
            sys.exit(f"outrider: PyTorch {torch.__version__} sees no GPU here: see `outrider doctor` and nvidia-smi")
        arguments = [argument for argument in arguments if argument != "--need-gpu"]
    report.write_text("".join(f"{name} {installed_version(name) or 'is not installed'}\n" for name in PACKAGES))
    for command in COMMANDS if sees_gpu else ():
        run(list(command), 60.0, report)
    configured = CONFIGURED if all(find_spec(name) for name in READS_CONFIGURATIONS) else ()
    bare = ["-c", os.devnull, "--confcutdir", HERE, "--rootdir", str(ROOT), "--import-mode=importlib"]
    bare += ["-p", "tests.support.threads"]  # from a conftest that is not read here
    bare += ["-W", "ignore::pytest.PytestUnknownMarkWarning", "-o", "faulthandler_timeout=600"]
    pytest = [sys.executable, "-m", "pytest", "-m", "not exhaustive", "-ra", "-p", "no:cacheprovider", *arguments]
    parts = {
        "kernels": [*pytest, *bare, HERE, "--ignore", ENGINES, "--ignore", LINKS[0], *SHARED, *configured],
        "links": [*pytest, *bare, *LINKS],
    }
    results = {}
    if reason := why_no_engines():
        results["engines"] = f"not run: {reason}"
    else:
        parts["engines"] = [*pytest, ENGINES]
    if sees_gpu and not arguments:
        parts["times"] = [sys.executable, "-m", "tests.bench.verification_speed", "--device", "cuda", "--ours-only"]
    failed = False
    for name, command in parts.items():
        began = time.monotonic()
        problem = run(command, LIMIT_S[name], report)
        failed = failed or bool(problem)
        results[name] = f"{time.monotonic() - began:6.0f} s  {f'FAILED: {problem}' if problem else 'ok'}"
    table = "\n".join(f"{name:12} {result}" for name, result in results.items())
    print(f"\n{table}\n")
    if not sees_gpu:
        print("PyTorch sees no GPU here: what needs one was skipped")
    with report.open("a") as file:
        file.write(f"\n{table}\n")
    print(f"send back: {report}")
    return int(failed)


def why_no_engines() -> str:
    """Why tests of engines cannot run here; empty where they can."""
    if not (installed_version("vllm") and find_spec("vllm")):
        return "vLLM's GPU build is not installed"
    return "" if find_spec("ray") else "Ray is not installed"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
