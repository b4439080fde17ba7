"""Identifies checkpoints by digests, and checks that a drafter was trained for its target.

The digests are of the tensors and of the vocabulary. An assembled drafter's manifest holds those of its target
(distill/stored.py): with another target it would load, and none of its drafts would be accepted.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from outrider.cluster.config_section import ConfigError
from outrider.cluster.vocabulary import read_vocabulary
from outrider.deploy.models.store import read_manifest

DRAFTER_OF = "drafter_of"
"""Key of an assembled drafter's manifest, for the target's ``Reference`` and the digest of its tensors' shapes."""

_TORCH_NAMES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8",
    "BOOL": "bool",
}  # fmt: skip
"""PyTorch's names, used in digests, of safetensors' types."""


@dataclass(frozen=True)
class Reference:
    """Identifies a checkpoint, wherever it is stored."""

    name: str
    weights_sha256: str
    vocabulary_sha256: str

    @staticmethod
    def of(checkpoint: Path) -> Reference:
        """Returns the reference of a checkpoint, which is read whole. Raises ConfigError."""
        return Reference(checkpoint.name, weights_digest(checkpoint), vocabulary_digest(checkpoint))

    def is_same(self, other: Reference) -> bool:
        return (self.weights_sha256, self.vocabulary_sha256) == (other.weights_sha256, other.vocabulary_sha256)


def check_made_for(target: Path, drafter: Path, *, every_tensor: bool = False) -> None:
    """Raises ConfigError if the drafter was assembled for another target.

    Args:
        target: Checkpoint directory.
        drafter: Checkpoint directory. Without a manifest it fits any target.
        every_tensor: Compares the tensors' values, too, not only their names, types and shapes.
    """
    if (made_for := (read_manifest(drafter) or {}).get(DRAFTER_OF)) is None:
        return
    compared = [("token ids", vocabulary_digest(target), made_for["vocabulary_sha256"])]
    if every_tensor:
        compared.append(("tensors", weights_digest(target), made_for["weights_sha256"]))
    elif "shapes_sha256" in made_for:
        compared.append(("tensors' shapes", weights_digest(target, contents=False), made_for["shapes_sha256"]))
    if parts := [f"its {what} have sha256 {is_[:12]}…, not {was[:12]}…" for what, is_, was in compared if is_ != was]:
        raise ConfigError(
            f"drafter.model: {drafter} was trained for {made_for['name']}, and the target {target} is another "
            f"checkpoint ({'; '.join(parts)}), which would accept next to nothing of it; set target.model to the one "
            "that it was trained with, or train one for this target: outrider distill"
        )


def vocabulary_digest(checkpoint: Path) -> str:
    """Returns the sha256 of the vocabulary, which is empty without a tokenizer.json."""
    vocabulary = read_vocabulary(str(checkpoint)) or {}
    return hashlib.sha256(json.dumps(sorted(vocabulary.items())).encode()).hexdigest()


def weights_digest(checkpoint: Path, *, contents: bool = True) -> str:
    """Returns the sha256 of all tensors in order of their names, however they are spread over files.

    Args:
        contents: False leaves out the values, so that only names, types and shapes count.

    Raises:
        ConfigError: A file is damaged.
    """
    digest, places = hashlib.sha256(), dict[str, Any]()
    with ExitStack() as opened:
        for path in sorted(checkpoint.glob("*.safetensors")):
            try:
                file = opened.enter_context(safe_open(path, "pt" if contents else "np"))
            except (OSError, SafetensorError) as error:
                raise ConfigError(
                    f"{path} is damaged or no safetensors file ({error}); get the checkpoint again"
                ) from None
            places |= dict.fromkeys(file.keys(), file)
        for name in sorted(places):
            layout = places[name].get_slice(name)
            dtype = _TORCH_NAMES.get(layout.get_dtype(), layout.get_dtype())
            digest.update(f"{name} torch.{dtype} {tuple(layout.get_shape())}\n".encode())
            if contents:
                import torch

                digest.update(places[name].get_tensor(name).reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
