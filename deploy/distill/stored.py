"""Stores a drafter as its trained tensors and a reference to its target, and assembles both to a checkpoint.

``drafter.safetensors`` holds the trained tensors, with matrices in 8 bits if asked for. ``drafter.json`` holds the
drafter's config.json, digests of the target's tensors and vocabulary, and the settings of the training. vLLM loads the
assembled checkpoint as any other. Another target is refused by its digests: none of the drafts would be accepted.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.actors.drafter.vocabulary import VOCABULARY_FILE
from outrider.actors.learning.draft_models import tensors_of
from outrider.cluster.config import ConfigError
from outrider.cluster.whole_files import whole_directory
from outrider.deploy.distill.models import HEAD
from outrider.deploy.models.identity import DRAFTER_OF, Reference, weights_digest
from outrider.deploy.models.store import read_manifest, write_manifest

if TYPE_CHECKING:
    import torch

FORMAT = "outrider-drafter-2"
DESCRIPTION, TENSORS = "drafter.json", "drafter.safetensors"
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "chat_template.jinja", "generation_config.json",
)  # fmt: skip
"""Files that an assembled drafter takes over from the target."""

_SCALE = ".scale"
"""Suffix of the float32 [rows] tensor with the scales of an 8-bit matrix. A value is its row's scale x the int8."""


@dataclass(frozen=True)
class Description:
    """Holds the content of drafter.json."""

    target: Reference
    config: dict[str, Any]
    borrowed: list[str]
    """Names of the tensors that the drafter takes over from the target."""

    tensors_sha256: str
    """Digest of the file drafter.safetensors."""

    made: dict[str, Any]
    draft_vocabulary: list[int] | None = None
    """Ids of the part of the vocabulary that the drafter was trained on, in the order of its outputs."""


def store(
    out: Path,
    target: Reference,
    checkpoint: Path,
    config: Mapping[str, Any],
    trained: Mapping[str, torch.Tensor],
    made: Mapping[str, Any],
    draft_vocabulary: Sequence[int] | None = None,
    bits: int = 16,
    borrows: bool = True,
) -> None:
    """Writes a stored drafter.

    Args:
        checkpoint: The target's directory.
        trained: All tensors that the drafter does not take from the target, float32. They are stored in the target's
            type, matrices as int8 if bits is 8.
        borrows: It takes the target's tensors outside of the layers, but for those in trained.
    """
    import torch
    from safetensors.torch import save_file

    dtypes = {name: tensor.dtype for name, tensor in tensors_of(checkpoint)}
    kept = dtypes.get("model.norm.weight", torch.bfloat16)
    outside = [name for name in dtypes if not name.startswith("model.layers.") and name not in trained]
    with whole_directory(out) as work:
        save_file(_packed(trained, kept, bits), work / TENSORS, metadata={"format": "pt"})
        description = Description(
            target,
            {**config, "dtype": str(kept).removeprefix("torch.")},
            outside if borrows else [],
            _file_digest(work / TENSORS),
            dict(made),
            None if draft_vocabulary is None else list(draft_vocabulary),
        )
        text = json.dumps({"format": FORMAT, **asdict(description)}, indent=1, allow_nan=False)
        (work / DESCRIPTION).write_text(text + "\n")


def read(stored: Path) -> Description:
    """Returns the description of a stored drafter. Raises ConfigError."""
    try:
        document = json.loads((stored / DESCRIPTION).read_text())
        if document.pop("format", None) != FORMAT:
            raise ValueError(f"its format is not {FORMAT}; train again")
        document.pop("base", None)  # written by earlier versions, the target again
        return Description(Reference(**document.pop("target")), **document)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{stored} is no stored drafter: {DESCRIPTION}: {error}") from None


def assemble(stored: Path, target: Path, out: Path, found: Reference | None = None) -> None:
    """Writes the whole checkpoint to a directory, in place of one that was assembled there before.

    Args:
        found: The target's reference, if the caller has it.

    Raises:
        ConfigError: The target is another one, a file is damaged, or the directory holds something else.
    """
    from safetensors.torch import load_file, save_file

    if out.exists() and DRAFTER_OF not in (read_manifest(out) or {}):
        raise ConfigError(f"--out: {out} is there and no assembled drafter; move it away, or choose another place")
    description = read(stored)
    found = found or Reference.of(target)
    if not description.target.is_same(found):
        same_words = description.target.vocabulary_sha256 == found.vocabulary_sha256
        raise ConfigError(
            f"{stored}: this drafter was trained for {description.target.name}, and {target} is not the target: its "
            f"{'tensors' if same_words else 'token ids'} are others. Give the checkpoint that it was trained with, or "
            "train one for this target: outrider distill"
        )
    if _file_digest(stored / TENSORS) != description.tensors_sha256:
        raise ConfigError(f"{stored / TENSORS} is damaged: its sha256 is not the one in {DESCRIPTION}; get it again")
    borrowed = {name: tensor for name, tensor in tensors_of(target) if name in description.borrowed}
    if description.config.get("tie_word_embeddings"):
        borrowed.pop(HEAD, None)
    with whole_directory(out) as work:
        tensors = {**borrowed, **_unpacked(load_file(stored / TENSORS), description.config["dtype"])}
        whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(whole, work / "model.safetensors", {"format": "pt"})
        (work / "config.json").write_text(json.dumps(description.config, indent=2) + "\n")
        if description.draft_vocabulary:
            (work / VOCABULARY_FILE).write_text(json.dumps(description.draft_vocabulary) + "\n")
        for name in TOKENIZER_FILES:
            if (target / name).is_file():
                shutil.copyfile(target / name, work / name)
        made_for = {**asdict(description.target), "shapes_sha256": weights_digest(target, contents=False)}
        write_manifest(work, {DRAFTER_OF: made_for, "tensors_sha256": description.tensors_sha256})


def _packed(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, bits: int) -> dict[str, torch.Tensor]:
    """Returns tensors for storage: matrices as int8 with a scale for each row if bits is 8, all others in dtype."""
    import torch

    packed = {}
    for name, tensor in tensors.items():
        value = tensor.detach().float().cpu()
        if bits == 8 and value.dim() == 2:
            scale = value.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny) / 127
            packed[name + _SCALE] = scale
            packed[name] = (value / scale[:, None]).round().to(torch.int8)
        else:
            packed[name] = value.to(dtype).contiguous()
    return packed


def _unpacked(tensors: Mapping[str, torch.Tensor], dtype: str) -> dict[str, torch.Tensor]:
    import torch

    return {
        name: tensor
        if tensor.dtype != torch.int8
        else (tensor * tensors[name + _SCALE][:, None]).to(getattr(torch, dtype))
        for name, tensor in tensors.items()
        if not name.endswith(_SCALE)
    }


def _file_digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
