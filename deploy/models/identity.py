"""Which checkpoint this is, wherever it lies, and whether a drafter was trained for it.

A checkpoint is known by its tensors and by what its token ids mean. An assembled drafter's manifest says so of its
target (distill/stored.py): beside another one it would load, and draft what nobody accepts. Reading all tensors takes a
second a gigabyte or so, so their digest is kept in ``$OUTRIDER_HOME/digests``, by path, and by name, size and time of
the files.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import mmap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.cluster.config_section import ConfigError
from outrider.cluster.vocabulary import read_vocabulary
from outrider.cluster.whole_files import whole_file
from outrider.deploy.models.store import MANIFEST, models_dir

logger = logging.getLogger(__name__)

DRAFTER_OF = "drafter_of"
"""In an assembled drafter's manifest: the target's `Reference` and its shapes_digest."""

READ_WHOLE_BYTES = 2 << 30
"""Of a target's tensors: up to here a server that starts reads them all, where their digest is not kept yet."""

_SETTLED_S = 2.0
"""A file may be written again within one tick of the clock that its time is of: a younger one's digest is not kept."""

_TORCH_NAMES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8",
    "BOOL": "bool",
}  # fmt: skip
"""safetensors' names of types, in digests by PyTorch's."""


@dataclass(frozen=True)
class Reference:
    """Which checkpoint is meant, wherever it lies."""

    name: str
    weights_sha256: str
    vocabulary_sha256: str

    @staticmethod
    def of(checkpoint: Path) -> Reference:
        """Reads all of it. Raises ConfigError."""
        return Reference(checkpoint.name, weights_digest(checkpoint), vocabulary_digest(checkpoint))

    def is_same(self, other: Reference) -> bool:
        return (self.weights_sha256, self.vocabulary_sha256) == (other.weights_sha256, other.vocabulary_sha256)


def check_made_for(target: Path, drafter: Path, *, every_tensor: bool = False) -> None:
    """Raise ConfigError where the drafter was assembled for another target, or its manifest is damaged. One without a
    manifest may be anybody's.

    every_tensor: whatever that takes. Else a large target whose digest is not kept is known by names and shapes alone.
    """
    made_for = _made_for(drafter)
    if made_for is None:
        return
    name, weights, vocabulary = (made_for[key] for key in ("name", "weights_sha256", "vocabulary_sha256"))
    found = kept_digest(target)
    if found is None and (every_tensor or _num_bytes(target) <= READ_WHOLE_BYTES):
        found = weights_digest(target)
    compared = [("token ids", vocabulary_digest(target), vocabulary)]
    if found is not None:
        compared.append(("tensors", found, weights))
    else:
        logger.warning(
            "%s is large, and drafter.model, which was trained for %s, is compared with it by names and shapes of its "
            "tensors alone; outrider acceptance compares all of them, and the next start knows",
            target,
            name,
        )
        if "shapes_sha256" in made_for:
            compared.append(("tensors' shapes", shapes_digest(target), made_for["shapes_sha256"]))
    if parts := [f"its {what} have sha256 {is_[:12]}…, not {was[:12]}…" for what, is_, was in compared if is_ != was]:
        raise ConfigError(
            f"drafter.model: {drafter} was trained for {name}, and the target {target} is another checkpoint "
            f"({'; '.join(parts)}), which would accept next to nothing of it; set target.model to the one that it was "
            f"trained with, or train one for this target: outrider distill"
        )


def _made_for(drafter: Path) -> dict[str, str] | None:
    """What the manifest says of the target; None: there is none, or it is no assembled drafter's."""
    file = drafter / MANIFEST
    try:
        made_for = json.loads(file.read_text()).get(DRAFTER_OF)
        if made_for is None:
            return None
        if all(isinstance(made_for.get(key), str) for key in ("name", "weights_sha256", "vocabulary_sha256")):
            return {key: str(value) for key, value in made_for.items()}
        reason = f"{DRAFTER_OF} names no checkpoint"
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, AttributeError) as error:
        reason = str(error)
    raise ConfigError(
        f"drafter.model: {file} does not say what the drafter was trained for ({reason}); assemble it again: "
        "outrider distill --assemble"
    )


def weights_digest(checkpoint: Path) -> str:
    """Of all tensors, by name: the same however they are spread over files. Raises ConfigError."""
    if (kept := kept_digest(checkpoint)) is not None:
        return kept
    state = _state(checkpoint)
    digest = hashlib.sha256()
    for name, tensor in _tensors(checkpoint):
        digest.update(_said(name, tensor))
        with tensor.file.open("rb") as opened:
            if tensor.end > tensor.start:
                with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data, memoryview(data) as view:
                    digest.update(view[tensor.start : tensor.end])
    _keep(checkpoint, state, digest.hexdigest())
    return digest.hexdigest()


def shapes_digest(checkpoint: Path) -> str:
    """Of names, types and shapes of all tensors. Raises ConfigError."""
    digest = hashlib.sha256()
    for name, tensor in _tensors(checkpoint):
        digest.update(_said(name, tensor))
    return digest.hexdigest()


def vocabulary_digest(checkpoint: Path) -> str:
    """Of what each token id means; of nothing where the checkpoint has no tokenizer.json."""
    vocabulary = read_vocabulary(str(checkpoint)) or {}
    return hashlib.sha256(json.dumps(sorted(vocabulary.items())).encode()).hexdigest()


@dataclass(frozen=True)
class _Tensor:
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int
    """Bytes of the file."""


def _tensors(checkpoint: Path) -> Iterator[tuple[str, _Tensor]]:
    """By name, of all safetensors files: a name that comes twice is the last file's."""
    found: dict[str, _Tensor] = {}
    for file in _files(checkpoint):
        try:
            with file.open("rb") as opened:
                length = int.from_bytes(opened.read(8), "little")
                header = json.loads(opened.read(length))
            header.pop("__metadata__", None)
            for name, about in header.items():
                start, end = about["data_offsets"]
                place = 8 + length
                if not 0 <= start <= end <= file.stat().st_size - place:
                    raise ValueError(f"{name} ends behind the file")
                found[name] = _Tensor(file, about["dtype"], tuple(about["shape"]), place + start, place + end)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ConfigError(f"{file} is damaged or no safetensors file ({error}); get the checkpoint again") from None
    yield from sorted(found.items())


def _said(name: str, tensor: _Tensor) -> bytes:
    return f"{name} torch.{_TORCH_NAMES.get(tensor.dtype, tensor.dtype)} {tensor.shape}\n".encode()


def _files(checkpoint: Path) -> list[Path]:
    return sorted(checkpoint.glob("*.safetensors"))


def _num_bytes(checkpoint: Path) -> int:
    return sum(file.stat().st_size for file in _files(checkpoint))


def kept_digest(checkpoint: Path) -> str | None:
    """A weights_digest of these very files; None: nobody has read them."""
    try:
        kept: dict[str, Any] = json.loads(_place(checkpoint).read_text())
        return str(kept["weights_sha256"]) if kept["files"] == _state(checkpoint) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _keep(checkpoint: Path, state: list[list[Any]], digest: str) -> None:
    """state: before the files were read."""
    newest = max((modified for _, _, modified in state), default=math.inf)
    if time.time() - newest / 1e9 < _SETTLED_S:
        return
    try:
        place = _place(checkpoint)
        place.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(place) as work:
            work.write_text(
                json.dumps({"checkpoint": str(checkpoint), "files": state, "weights_sha256": digest}) + "\n"
            )
    except OSError as error:
        logger.info("the digest of %s is not kept, and is computed again the next time: %s", checkpoint, error)


def _state(checkpoint: Path) -> list[list[Any]]:
    """[name, bytes, time in ns] of each file."""
    return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in _files(checkpoint)]


def _place(checkpoint: Path) -> Path:
    name = hashlib.sha256(str(checkpoint.resolve()).encode()).hexdigest()[:32]
    return models_dir().parent / "digests" / f"{name}.json"
