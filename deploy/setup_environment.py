"""Installs Outrider into the virtual environment whose Python runs this: ``make setup``.

It uses the standard library only, since it runs before anything is installed. It picks the CPU or the GPU build of
vLLM, lets uv install it from pip's package indexes, and checks the imports of serving.
"""

from __future__ import annotations

import argparse
import ast
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
"""Packages that vLLM's CPU build requires without a version, and that are left out: built for another torch, they break
the import of transformers. Serving text needs none of them."""

UV = "uv==0.13.9"
"""The installer. It took 20 s where pip took 107 s."""

PIP_SETTINGS = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "trusted-host": "UV_INSECURE_HOST",
    "cert": "SSL_CERT_FILE",
    "proxy": "ALL_PROXY",
}
"""Maps pip's settings of package sources to uv's environment variables; uv does not read pip's."""

CPU_TORCH_HINT = (
    "The package index offers no CPU build of torch. Set UV_TORCH_BACKEND=cpu, or point PIP_EXTRA_INDEX_URL at "
    "PyTorch's CPU wheel index (its address is in PyTorch's install instructions), and run `make setup` again."
)


class SetupError(RuntimeError):
    """Says why the setup failed, and what to do."""


def number_of_gpus() -> int:
    """Returns how many GPUs nvidia-smi lists; 0 without it."""
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())


def uv_settings(pip_settings: str) -> dict[str, str]:
    """Returns uv's environment for pip's package sources.

    A command's section overrides the global one, and the environment both, as in pip.

    Args:
        pip_settings: The output of ``pip config list``.
    """
    found: dict[str, str] = {}
    lines = [line.partition("=") for line in pip_settings.splitlines() if "=" in line]
    for section in ("global", "install", ":env:"):
        for key, _, value in lines:
            of, _, name = key.partition(".")
            if of == section and name in PIP_SETTINGS:
                found[PIP_SETTINGS[name]] = " ".join(str(ast.literal_eval(value)).split())
    if places := found.get("UV_FIND_LINKS"):
        found["UV_FIND_LINKS"] = places.replace(" ", ",")  # uv separates this list by commas
    # Like pip, uv then takes the best version of any index, not of the first one that has the package.
    return {"UV_INDEX_STRATEGY": "unsafe-best-match", **found}


def verify(accelerator: str) -> None:
    """Imports what serving imports, which also writes its bytecode. Raises SetupError."""
    print("Checking that torch, transformers, vLLM, Ray and Outrider work together (up to a minute)", flush=True)
    flashinfer = "flashinfer, " if accelerator == "gpu" else ""  # by which vLLM chooses attention
    code = (
        f"import torch, {flashinfer}ray.serve, outrider.actors.serving.replica\n"
        "import outrider.actors.vllm_adapter.target_engine, outrider.actors.vllm_adapter.target_worker\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel"
    )
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    # Outside the source tree, so that missing packages of ours are noticed.
    done = subprocess.run([sys.executable, "-c", code], env=variables, cwd=sys.prefix, capture_output=True, text=True)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise SetupError(f"what is installed does not work here: {last}")


def set_up(accelerator: str, *, serving: bool) -> None:
    """Installs everything and checks it. serving: a copy for an image, without development tools. Raises SetupError."""
    if sys.prefix == sys.base_prefix:
        raise SetupError("run this with a virtual environment's Python; `make setup` does")
    if shlex.quote(sys.executable) != sys.executable:
        raise SetupError(
            f"{sys.executable}: Ray starts engines through a shell, which takes this path apart; make the environment "
            "in another place: make VENV=/path/without/spaces, with this target and every later one"
        )
    print(f"Installing Outrider for {accelerator} into {sys.prefix} (1 to 3 minutes)", flush=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    if subprocess.run([*pip, "install", "--quiet", UV]).returncode != 0:
        raise SetupError(f"pip could not install {UV}; its own words are above.")
    settings = uv_settings(subprocess.run([*pip, "config", "list"], capture_output=True, text=True).stdout)
    what = [f".[{accelerator},otel]"] if serving else ["--editable", f".[{accelerator},dev]"]
    with tempfile.NamedTemporaryFile("w") as never:
        never.writelines(f"{name}; python_version < '3'\n" for name in COMPANIONS)
        never.flush()
        command = [sys.executable, "-m", "uv", "pip", "install", "--python", sys.executable, *what]
        command += ["--overrides", never.name] if accelerator == "cpu" else []
        done = subprocess.run(command, cwd=ROOT, env={**settings, **os.environ})  # uv's own variables take precedence
    if done.returncode != 0:
        raise SetupError(f"uv ended with exit code {done.returncode}. {CPU_TORCH_HINT if accelerator == 'cpu' else ''}")
    if accelerator == "gpu" and not number_of_gpus():
        print("Not tried out, since no GPU is here: `make test-cuda-build` does what can be done without")
    else:
        verify(accelerator)
    print("Ready", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Install Outrider into this virtual environment.")
    parser.add_argument("--accelerator", choices=("cpu", "gpu"), help="default: gpu where nvidia-smi lists one")
    parser.add_argument("--serving", action="store_true", help="for an image: no development tools, not editable")
    arguments = parser.parse_args()
    try:
        set_up(arguments.accelerator or ("gpu" if number_of_gpus() else "cpu"), serving=arguments.serving)
    except SetupError as error:
        print(f"outrider: setup failed. {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
