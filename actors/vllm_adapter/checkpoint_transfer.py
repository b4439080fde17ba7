"""A weight transfer engine of vLLM's that reads new weights from a checkpoint which every rank can open.

It runs on any device, CPU among them, where vLLM's own engines need NCCL or CUDA IPC. ``weight_transfer_config:
{backend: checkpoint}`` chooses it; ``update_info`` is ``{"path": DIRECTORY}``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

BACKEND = "checkpoint"


@dataclass
class CheckpointInitInfo(WeightTransferInitInfo):
    """Nothing has to be agreed on beforehand."""


@dataclass
class CheckpointUpdateInfo(WeightTransferUpdateInfo):
    """path: directory with the checkpoint's ``*.safetensors``, in the same layout as the target's own."""

    path: str


class CheckpointTransferEngine(WeightTransferEngine[CheckpointInitInfo, CheckpointUpdateInfo]):
    """Loads weights from safetensors files, layer by layer, into the model that serves."""

    init_info_cls = CheckpointInitInfo
    update_info_cls = CheckpointUpdateInfo

    def init_transfer_engine(self, init_info: CheckpointInitInfo) -> None:
        """Does nothing."""

    def start_weight_update(self) -> None:
        """Prepares the layers for weights in the checkpoint's format."""
        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        """Brings the layers into the format that the device's kernels take."""
        finalize_layerwise_reload(self.model, self.model_config)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Loads one checkpoint. Raises ValueError for a path without weights."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: CheckpointUpdateInfo) -> None:
        """Loads the tensors of a checkpoint. Each rank takes its own part of each."""
        files = sorted(Path(update_info.path).glob("*.safetensors"))
        if not files:
            raise ValueError(f"update_info.path: {update_info.path} holds no *.safetensors on this rank's machine")
        self.model.load_weights(_tensors(files))

    def shutdown(self) -> None:
        """Does nothing."""


def register() -> None:
    """Makes the engine known to vLLM in this process. A second call does nothing."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, CheckpointTransferEngine)


def _tensors(files: list[Path]) -> Iterator[tuple[str, Tensor]]:
    for path in files:
        with safe_open(str(path), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                yield name, file.get_tensor(name)
