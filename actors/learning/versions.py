"""Records a drafter's versions, and keeps a file of each on disk."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from outrider.actors.learning.draft_models import tensors_of
from outrider.actors.learning.gate import Difference, Verdict
from outrider.cluster.whole_files import whole_file

if TYPE_CHECKING:
    from torch import Tensor

    from outrider.actors.learning.texts import Text

logger = logging.getLogger(__name__)

KEPT_VERSIONS = 3
"""The latest, to go back to: in memory and on disk. Of twelve versions that served in 39 minutes of shifting traffic
none was withdrawn (docs/learning.md), and each costs a copy of the drafter."""

MOST_SHOWN = 8
SERVES, REPLACED, WITHDRAWN, REVERTED = "serves", "replaced", "withdrawn", "reverted"
"""States: a better version took its place; it turned out worse than the one before; an operator went back."""

_SAMPLES, _SAMPLE_BYTES = 64, 4096


@dataclass(eq=False)
class Version:
    """Holds a copy of the tensors in training at one moment, rounded as the drafter holds them."""

    number: int  # 0: the drafter as it was loaded
    tensors: Mapping[str, Tensor]  # empty once it is no longer kept
    step: int = 0
    held_out: int = 0  # held-out texts that had come when it began to serve
    verdict: Verdict | None = None  # of the gate that let it in
    again: int | None = None  # the former version whose tensors it has
    since: Difference | None = None  # against the version before on later texts, if it was withdrawn for that
    state: str = SERVES
    began_unix_s: float = field(default_factory=time.time)
    scores: WeakKeyDictionary[Text, float] = field(default_factory=WeakKeyDictionary)  # acceptance, measured once

    def row(self) -> dict[str, Any]:
        """Returns DrafterVersion of the public API, as a dict."""
        return {
            **{name: getattr(self, name) for name in ("number", "again", "step")},
            "state": f"DRAFTER_VERSION_STATE_{self.state.upper()}",
            "began_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.began_unix_s)),
            "kept": bool(self.tensors),
            "verdict": self.verdict and self.verdict.row(),
            "since": self.since and self.since.row(),
        }


def status_of(learning: Mapping[str, Any]) -> dict[str, Any]:
    """Returns DrafterLearning of the public API, as a dict. learning: LearningMember.status(), whose trainer has been
    heard of."""
    trainer = learning["trainer"]
    return {
        **{name: trainer[name] for name in ("steps", "tokens", "refused", "versions")},
        "drafting": learning["version"],
        "serving": trainer["version"],
        "last_comparison": trainer["last_verdict"],
    }


class VersionStore:
    """Keeps the versions of a drafter as DIRECTORY/BASE/version-000007.safetensors and its like.

    A file holds all tensors, learned or not: in the place of ``model.safetensors`` beside the other files of the
    checkpoint that learning began with it is a checkpoint that ``drafter.model`` takes.
    """

    def __init__(self, directory: Path, base: Path) -> None:
        """base: the checkpoint from which training started."""
        self._directory, self._base = directory / sampled_digest(base)[:12], base

    def save(self, number: int, tensors: Mapping[str, Tensor]) -> Path:
        """Writes a version, whole or not at all. Raises OSError and, where the disk is full, SafetensorError."""
        from safetensors.torch import save_file

        self._directory.mkdir(parents=True, exist_ok=True)
        final = self._directory / f"version-{number:06d}.safetensors"
        whole = {name: tensors.get(name, old).contiguous() for name, old in tensors_of(self._base)}
        with whole_file(final) as work:
            save_file(whole, work, {"format": "pt"})
        for old in list(self._files().values())[:-KEPT_VERSIONS]:
            old.unlink(missing_ok=True)
        return final

    def remove_after(self, number: int) -> None:
        """Removes later versions, so that a restart does not resume them. Raises OSError."""
        for later, file in self._files().items():
            if later > number:
                file.unlink(missing_ok=True)

    def latest(self, names: set[str]) -> tuple[int, dict[str, Tensor]] | None:
        """Returns the number and the named tensors of the last version that is readable."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        for number, file in reversed(self._files().items()):
            try:
                tensors = load_file(file)
                return number, {name: tensors[name] for name in names}
            except (OSError, SafetensorError, KeyError) as error:
                logger.warning("%s is not readable, and is left alone: %s", file, error)
        return None

    def _files(self) -> dict[int, Path]:
        """Returns the files by number, ascending."""
        found = {path.stem.removeprefix("version-"): path for path in self._directory.glob("version-*.safetensors")}
        return dict(sorted((int(number), path) for number, path in found.items() if number.isdigit()))


def sampled_digest(checkpoint: Path) -> str:
    """Hashes names, sizes and some bytes of a checkpoint's files: tells two apart in a moment, on any node."""
    digest = hashlib.sha256()
    for file in sorted(checkpoint.glob("*")):
        if file.name == "config.json" or file.suffix == ".safetensors":
            size = file.stat().st_size
            digest.update(f"{file.name} {size} ".encode())
            with file.open("rb") as opened:
                for place in range(_SAMPLES):
                    opened.seek(size * place // _SAMPLES)
                    digest.update(opened.read(_SAMPLE_BYTES))
    return digest.hexdigest()
