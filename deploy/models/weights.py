"""The weights of a checkpoint: in which files they are, and what an engine on CPU needs of a machine's memory."""

from __future__ import annotations

import json
from pathlib import Path

from outrider.cluster.config import ConfigError, EngineConfig
from outrider.cluster.device_defaults import CPU_KV_CACHE_BYTES

_INDEX = "model.safetensors.index.json"

RUNTIME_BYTES = 1_500_000_000
"""Of a process with torch and vLLM, beside weights and KV cache: mostly imported code and buffers."""


def weight_files(directory: Path) -> list[Path]:
    """What a loader would read. Raises ConfigError when there is nothing, or less than the index promises."""
    index = directory / _INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise ConfigError(f"{index} is not readable ({error}); fetch the model again") from None
        if missing := [name for name in names if not (directory / name).is_file()]:
            raise ConfigError(
                f"{directory}: {missing[0]} is missing, {len(missing)} of {len(names)} weight files in all; "
                "fetch the model again"
            )
        return [directory / name for name in names]
    for pattern in ("*.safetensors", "pytorch_model*.bin", "*.pt", "*.gguf"):
        if found := sorted(directory.glob(pattern)):
            return found
    raise ConfigError(f"{directory} holds no weights (*.safetensors, *.bin); fetch the model again")


def weight_bytes(model: str, dtype: str) -> int | None:
    """Of a local checkpoint as an engine of dtype has it in memory; None where it cannot be told."""
    directory = Path(model)
    try:
        if not directory.is_dir():
            return None
        stored = sum(path.stat().st_size for path in weight_files(directory))
    except (ConfigError, OSError):
        return None
    # Checkpoints hold 2 bytes a weight, as a rule.
    return 2 * stored if dtype == "float32" and _stored_as(directory) != "float32" else stored


def _stored_as(directory: Path) -> str | None:
    try:
        document = json.loads((directory / "config.json").read_text())
    except (OSError, ValueError):
        return None
    return document.get("dtype") or document.get("torch_dtype")


def bytes_beside_weights(engine: EngineConfig) -> int:
    """Of all its ranks on CPU."""
    return engine.num_ranks * ((engine.kv_cache_memory_bytes or CPU_KV_CACHE_BYTES) + RUNTIME_BYTES)
