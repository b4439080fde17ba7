"""The check-up's part that looks at checkpoints: there, whole, readable, and made for each other."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from cluster.config import ConfigError, DraftModelConfig, EngineConfig, OutriderConfig
from deploy.doctor.finding import Finding, fail, judged, ok, warn
from deploy.models.check import check_models, read_vocabulary

_INDEX = "model.safetensors.index.json"
_LONGEST_HEADER_BYTES = 100_000_000  # safetensors' own limit
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")


def check_checkpoints(config: OutriderConfig) -> list[Finding]:
    """Files of every checkpoint, then what they say against the configuration and each other."""
    findings = check_files("target", config.target.model)
    model = drafter_model(config)
    if model is not None:
        findings += check_files("drafter", model, needs_tokenizer=False)
    findings.append(
        judged("models", "heads fit ranks, lengths fit positions, vocabularies agree", lambda: check_models(config))
    )
    if isinstance(config.drafter, DraftModelConfig) and (
        read_vocabulary(config.target.model) is None or read_vocabulary(config.drafter.model) is None
    ):
        findings.append(
            warn(
                "tokenizers",
                "one of the two has no tokenizer.json here: their tokens were not compared one by one",
                "make sure that the drafter is of the target's family; a wrong one only drafts badly, but always",
            )
        )
    return findings


def drafter_model(config: OutriderConfig) -> str | None:
    """Checkpoint of the draft model or heads; None where the method has none of its own."""
    model: str | None = getattr(config.drafter, "model", None)
    return model


def check_files(section: str, model: str, needs_tokenizer: bool = True) -> list[Finding]:
    """Of a local checkpoint. A hub id is fetched at start-up: nothing to check but that."""
    directory = Path(model)
    subject = f"{section}.model"
    if not directory.is_dir():
        return [
            warn(
                subject,
                f"{model} is a hub id: its weights are fetched at start-up",
                "fetch it first where the machine that serves has no way to the hub, and give the directory",
            )
        ]
    try:
        files = weight_files(directory)
        size = sum(path.stat().st_size for path in files)
        for path in files:
            if path.suffix == ".safetensors":
                _check_safetensors(path)
    except ConfigError as error:
        problem, _, fix = str(error).partition("; ")
        return [fail(subject, problem, fix)]
    findings = [
        ok(subject, f"{directory}: {len(files)} weight file{'s' if len(files) > 1 else ''}, {size / 1e9:.2f} GB")
    ]
    if needs_tokenizer and not any((directory / name).is_file() for name in _TOKENIZER_FILES):
        findings.append(
            fail(
                f"{section}.tokenizer",
                f"{directory} holds no tokenizer ({', '.join(_TOKENIZER_FILES)})",
                "fetch the model again, or set target.tokenizer to a directory that has one",
            )
        )
    return findings


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


def weight_bytes(engine: EngineConfig | str) -> int | None:
    """Of a local checkpoint on disk; None where it cannot be told."""
    directory = Path(engine if isinstance(engine, str) else engine.model)
    try:
        return sum(path.stat().st_size for path in weight_files(directory)) if directory.is_dir() else None
    except (ConfigError, OSError):
        return None


def _check_safetensors(path: Path) -> None:
    """Raise ConfigError unless the file is as long as its own header says: a download that broke off is not."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _LONGEST_HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(file.read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        wanted, there = 8 + length + max(ends, default=0), path.stat().st_size
        if there != wanted:
            raise ValueError(f"{there} bytes, its header says {wanted}")
    except PermissionError:
        raise ConfigError(f"{path} may not be read; check its permissions") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ConfigError(f"{path} is damaged ({error}); fetch the model again") from None
