"""Tells which checkpoint a directory holds, and whether a drafter was trained for it.

A checkpoint is known by its tensors and by what its token ids mean. An assembled drafter's manifest says so of its
target (distill/stored.py): beside another target it would load, and draft what is never accepted.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from outrider.cluster.config_section import ConfigError
from outrider.cluster.vocabulary import read_vocabulary
from outrider.deploy.models.store import MANIFEST

DRAFTER_OF = "drafter_of"
"""In an assembled drafter's manifest: the target's `Reference` and its shapes_digest."""

READ_WHOLE_BYTES = 2 << 30
"""Up to this size a server that starts reads all tensors of a target, about a second. Of larger ones it compares names
and shapes; ``outrider acceptance`` reads all of any."""

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
    """Raises ConfigError where the drafter was assembled for another target, or its manifest is damaged.

    Args:
        target: Checkpoint directory.
        drafter: Checkpoint directory. One without a manifest may be anybody's.
        every_tensor: Read all tensors however large the target is.
    """
    made_for = _made_for(drafter)
    if made_for is None:
        return
    compared = [("token ids", vocabulary_digest(target), made_for["vocabulary_sha256"])]
    if every_tensor or sum(file.stat().st_size for file in _files(target)) <= READ_WHOLE_BYTES:
        compared.append(("tensors", weights_digest(target), made_for["weights_sha256"]))
    elif "shapes_sha256" in made_for:
        compared.append(("tensors' shapes", shapes_digest(target), made_for["shapes_sha256"]))
    if parts := [f"its {what} have sha256 {is_[:12]}…, not {was[:12]}…" for what, is_, was in compared if is_ != was]:
        raise ConfigError(
            f"drafter.model: {drafter} was trained for {made_for['name']}, and the target {target} is another "
            f"checkpoint ({'; '.join(parts)}), which would accept next to nothing of it; set target.model to "
            f"the one that it was trained with, or train one for this target: outrider distill"
        )


def _made_for(drafter: Path) -> dict[str, str] | None:
    """Returns what the manifest says of the target; None where there is none, or it is no assembled drafter's."""
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
    """Returns the sha256 of all tensors, by name: the same however they are spread over files. Raises ConfigError."""
    digest = hashlib.sha256()
    for name, tensor in _tensors(checkpoint):
        digest.update(_said(name, tensor))
        with tensor.file.open("rb") as opened:
            if tensor.end > tensor.start:
                with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data, memoryview(data) as view:
                    digest.update(view[tensor.start : tensor.end])
    return digest.hexdigest()


def shapes_digest(checkpoint: Path) -> str:
    """Returns the sha256 of names, types and shapes of all tensors. Raises ConfigError."""
    digest = hashlib.sha256()
    for name, tensor in _tensors(checkpoint):
        digest.update(_said(name, tensor))
    return digest.hexdigest()


def vocabulary_digest(checkpoint: Path) -> str:
    """Returns the sha256 of what each token id means; of nothing where there is no tokenizer.json."""
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
