"""Checkpoints of a training run, each there as a whole or not at all."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from outrider.cluster.whole_files import UNFINISHED, whole_directory
from outrider.deploy.models.store import read_manifest, write_manifest

TENSORS, OPTIMIZER = "trained.safetensors", "optimizer.pt"
KEPT = 2
"""The last one, and one before it."""


class Checkpoints:
    """Of a training run: ``step-00000120`` and so on, the last two of them, each with a manifest of its files."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def save(
        self, step: int, config: dict[str, Any], tensors: dict[str, Any], optimizer: Any, about: dict[str, Any]
    ) -> None:
        """config: the drafter's. tensors: torch tensors by name. optimizer: a state_dict. about: for the manifest."""
        import torch
        from safetensors.torch import save_file

        with whole_directory(self._directory / f"step-{step:08d}") as work:
            save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, work / TENSORS)
            torch.save(optimizer, work / OPTIMIZER)
            (work / "config.json").write_text(json.dumps(config))
            write_manifest(work, {**about, "step": step})
        for old in self._complete()[:-KEPT]:
            shutil.rmtree(old)

    def latest(self) -> Path | None:
        """The last complete one."""
        complete = self._complete()
        return complete[-1] if complete else None

    def load(self, path: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """Tensors, optimizer, about; on the CPU."""
        import torch
        from safetensors.torch import load_file

        about = read_manifest(path)
        assert about is not None
        return load_file(path / TENSORS), torch.load(path / OPTIMIZER, weights_only=True, map_location="cpu"), about

    def _complete(self) -> list[Path]:
        found = sorted(self._directory.glob("step-*"))
        return [path for path in found if not path.name.endswith(UNFINISHED) and read_manifest(path) is not None]
