"""The wires that a link can have, by name. A module of its own: links are tested where no configuration can be read,
and configurations are read where nobody needs NumPy.
"""

from __future__ import annotations

from typing import Literal

Backend = Literal["auto", "local", "gloo", "nccl", "hccl", "xccl"]

DEVICE_BACKENDS = {"nccl": "cuda", "hccl": "npu", "xccl": "xpu"}
"""Those of torch.distributed, by its names, that move a device's memory, and torch's name for that kind of device.
ROCm's are nccl and cuda."""
