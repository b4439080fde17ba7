"""A drafter as it is kept: what was trained, and a reference to the target for the rest.

``drafter.safetensors`` holds the trained tensors, matrices in 8 bits where that was asked for; ``drafter.json`` the
drafter's config.json, digests of the target's tensors and vocabulary, and how it was made. `assemble` puts both
together to a checkpoint that vLLM, and so our drafter actor, loads as any other. A drafter of another target is refused
by its digest: it would load, and draft what nobody accepts.
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
from outrider.deploy.models.identity import DRAFTER_OF, Reference, shapes_digest
from outrider.deploy.models.store import read_manifest, write_manifest

if TYPE_CHECKING:
    import torch

FORMAT = "outrider-drafter-2"
_READABLE = (FORMAT, "outrider-drafter-1")
"""The first one had no matrices in 8 bits."""

DESCRIPTION, TENSORS = "drafter.json", "drafter.safetensors"
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "chat_template.jinja", "generation_config.json",
)  # fmt: skip
"""What an assembled drafter has from the target as it is."""

_SCALE = ".scale"
"""Of a matrix in 8 bits, beside it under its name: float32 [rows]. A value is its row's scale x the int8."""


@dataclass(frozen=True)
class Description:
    """drafter.json."""

    target: Reference
    base: Reference
    """Whose tensors it takes over: the target, or the drafter that was trained further."""

    config: dict[str, Any]
    """config.json of the drafter."""

    borrowed: list[str]
    """The tensors it takes over."""

    tensors_sha256: str
    """Of drafter.safetensors, the file."""

    made: dict[str, Any]
    """How: options, seed, data, what was measured."""

    draft_vocabulary: list[int] | None = None
    """Ids by draft rank where it was trained on a part of the vocabulary: the n-th is the n-th id that it drafts."""


def store(
    out: Path,
    target: Reference,
    base: Reference,
    base_checkpoint: Path,
    config: Mapping[str, Any],
    trained: Mapping[str, torch.Tensor],
    made: Mapping[str, Any],
    draft_vocabulary: Sequence[int] | None = None,
    bits: int = 16,
) -> None:
    """Write a stored drafter. trained: float32; it is kept in the type that the base has, matrices as int8 if bits is
    8."""
    import torch
    from safetensors.torch import save_file

    dtypes = {name: tensor.dtype for name, tensor in tensors_of(base_checkpoint)}
    kept = dtypes.get("model.norm.weight", torch.bfloat16)
    borrowed = [name for name in dtypes if not name.startswith("model.layers.") and name not in trained]
    with whole_directory(out) as work:
        save_file(_packed(trained, kept, bits), work / TENSORS, metadata={"format": "pt"})
        description = Description(
            target,
            base,
            {**config, "dtype": str(kept).removeprefix("torch.")},
            borrowed,
            _file_digest(work / TENSORS),
            dict(made),
            None if draft_vocabulary is None else list(draft_vocabulary),
        )
        text = json.dumps({"format": FORMAT, **asdict(description)}, indent=1, allow_nan=False)
        (work / DESCRIPTION).write_text(text + "\n")


def read(stored: Path) -> Description:
    """Raises ConfigError."""
    file = stored / DESCRIPTION
    try:
        document = json.loads(file.read_text())
        if document.pop("format", None) not in _READABLE:
            raise ConfigError(
                f"{file}: its format is not {' or '.join(_READABLE)}; it was made by another version, train again"
            )
        target, base = (Reference(**document.pop(key)) for key in ("target", "base"))
        return Description(target, base, **document)
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"{stored} is no stored drafter: it has no {DESCRIPTION}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} is not readable as a stored drafter's description ({error})") from None


def assemble(stored: Path, target: Path, out: Path, base: Path | None = None, found: Reference | None = None) -> None:
    """Write the whole checkpoint to ``out``, in place of one that was assembled there before.

    base: the drafter that was trained further, where the description names one. found: the target's reference where the
    caller has it. Raises ConfigError: another target, another base, a damaged file, something else in ``out``.
    """
    from safetensors.torch import load_file, save_file

    if out.exists() and DRAFTER_OF not in (read_manifest(out) or {}):
        raise ConfigError(f"--out: {out} is there and no assembled drafter; move it away, or choose another place")
    description = read(stored)
    found = found or Reference.of(target)
    _check("the target", description.target, found, target, stored)
    source = target
    if not description.base.is_same(description.target):
        if base is None:
            raise ConfigError(
                f"{stored}: it takes its embeddings from {description.base.name}, which it was trained from; give that "
                "checkpoint with --from"
            )
        _check("the drafter it was trained from", description.base, Reference.of(base), base, stored)
        source = base
    if _file_digest(stored / TENSORS) != description.tensors_sha256:
        raise ConfigError(f"{stored / TENSORS} is damaged: its sha256 is not the one in {DESCRIPTION}; get it again")
    borrowed = {name: tensor for name, tensor in tensors_of(source) if name in description.borrowed}
    if missing := set(description.borrowed) - borrowed.keys():
        raise ConfigError(f"{source}: it has no {', '.join(sorted(missing))}; fetch the checkpoint again")
    if description.config.get("tie_word_embeddings"):
        borrowed.pop(HEAD, None)
    with whole_directory(out) as work:
        tensors = {**borrowed, **_unpacked(load_file(stored / TENSORS), description.config["dtype"])}
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            work / "model.safetensors",
            {"format": "pt"},
        )
        (work / "config.json").write_text(json.dumps(description.config, indent=2) + "\n")
        if description.draft_vocabulary:
            (work / VOCABULARY_FILE).write_text(json.dumps(description.draft_vocabulary) + "\n")
        for name in TOKENIZER_FILES:
            if (target / name).is_file():
                shutil.copyfile(target / name, work / name)
        made_for = {**asdict(description.target), "shapes_sha256": shapes_digest(target)}
        write_manifest(work, {DRAFTER_OF: made_for, "tensors_sha256": description.tensors_sha256})


def _packed(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, bits: int) -> dict[str, torch.Tensor]:
    """If bits is 8, matrices as int8, to the nearest, each row by its largest value; all else in dtype."""
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


def _check(what: str, wanted: Reference, found: Reference, checkpoint: Path, stored: Path) -> None:
    if wanted.is_same(found):
        return
    parts = [
        f"its {part} have sha256 {have[:12]}…, wanted are {want[:12]}…"
        for part, have, want in (
            ("tensors", found.weights_sha256, wanted.weights_sha256),
            ("token ids", found.vocabulary_sha256, wanted.vocabulary_sha256),
        )
        if have != want
    ]
    raise ConfigError(
        f"{stored}: this drafter was trained for {wanted.name}, and {checkpoint} is not {what}: {'; '.join(parts)}. "
        "Give the checkpoint that it was trained with, or train one for this target: outrider distill"
    )


def _file_digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
