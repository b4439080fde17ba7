"""``python -m tests.gpu [--need-gpu] [pytest's arguments]`` runs the GPU tests in parts and writes a report.

Kernels and links need a checkout, PyTorch, Triton, NumPy and pytest; neither vLLM nor Ray, nor an installation. They
are the tests of this folder, and those of the other suites that import no more than that, by the lists below. Engines
need an environment with vLLM's GPU build and Ray. Each part is a pytest process of its own and runs whatever the former
came to. On a GPU and without arguments, verification's times follow. The table at the end is also in gpu-report.txt, in
the current directory, with versions and failures. The exit status is 1 where a part failed.

--need-gpu: ends at once where PyTorch sees no GPU; otherwise tests that need one are skipped.
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import torch

from outrider.cluster.installed import installed_version
from tests.gpu.parts import NO_TESTS, ROOT, Part, report, run_measurement, run_tests, table

HERE = "tests/gpu"
REPORT = "gpu-report.txt"
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
"""Of the other suites: draft loop, cut head, draft lengths, verification, training."""

CONFIGURED = ("tests/unit/round",)
"""Needs what reads configurations as well."""

READS_CONFIGURATIONS = ("pydantic", "yaml", "jsonschema")


def main(arguments: list[str]) -> int:
    destination = Path(REPORT).absolute()
    sees_gpu = torch.cuda.is_available()
    if "--need-gpu" in arguments:
        if not sees_gpu:
            sys.exit(f"outrider: PyTorch {torch.__version__} sees no GPU here: see `outrider doctor` and nvidia-smi")
        arguments = [argument for argument in arguments if argument != "--need-gpu"]
    configured = CONFIGURED if all(find_spec(name) for name in READS_CONFIGURATIONS) else ()
    bare = ["-c", os.devnull, "--confcutdir", HERE, "--rootdir", str(ROOT), "--import-mode=importlib"]
    bare += ["-p", "tests.support.threads"]  # from a conftest that is not read here
    bare += ["-W", "ignore::pytest.PytestUnknownMarkWarning", "-o", "faulthandler_timeout=600"]
    common = ["-m", "not exhaustive", "-ra", "-p", "no:cacheprovider"]
    kernels = [HERE, "--ignore", f"{HERE}/engines", "--ignore", LINKS[0], *SHARED, *configured]
    parts = [
        run_tests("kernels", [*bare, *common, *kernels, *arguments], LIMIT_S["kernels"]),
        run_tests("links", [*bare, *common, *LINKS, *arguments], LIMIT_S["links"]),
    ]
    if reason := why_no_engines():
        parts.append(Part("engines", not_run=reason))
    else:
        parts.append(run_tests("engines", [*common, f"{HERE}/engines", *arguments], LIMIT_S["engines"]))
    if sees_gpu and not arguments:
        measure = [sys.executable, "-m", "tests.bench.verification_speed", "--device", "cuda", "--ours-only"]
        parts.append(run_measurement("times", measure, LIMIT_S["times"]))
    print(f"\n{table(parts)}\n")
    if not sees_gpu:
        print("PyTorch sees no GPU here: what needs one was skipped")
    destination.write_text(report(parts))
    print(f"send back: {destination}")
    if any(part.failed for part in parts):
        return 1
    return NO_TESTS if all(part.status == NO_TESTS for part in parts if not part.not_run) else 0


def why_no_engines() -> str:
    """Why tests of engines cannot run here; empty where they can."""
    if not (installed_version("vllm") and find_spec("vllm")):
        return "vLLM's GPU build is not installed"
    return "" if find_spec("ray") else "Ray is not installed"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
