"""Turns vLLM's arguments (``LLM(...)`` and ``vllm serve ...``) into an Outrider configuration."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.cluster.config import (
    MLP_SPECULATOR,
    REMOTE_METHODS,
    ConfigError,
    DraftModelConfig,
    EngineConfig,
    OutriderConfig,
    TargetConfig,
    parse_config,
)
from outrider.deploy.preset import locate

logger = logging.getLogger("outrider")

SPECULATION_KEYS = ("num_paths", "verification", "draft_top_n", "adaptive", "draft_ahead", "max_side_branches")
"""Keys of the ``speculation`` section that may stand in ``speculative_config``, beside vLLM's own."""

IGNORED_ARGUMENTS = ("distributed_executor_backend", "disable_log_stats")
"""Arguments of vLLM's that change nothing here: ranks are Ray actors, and statistics are always kept."""

NOT_ARGUMENTS = {
    "speculative_model": "write speculative_config={'method': 'draft_model', 'model': ...}",
    "num_speculative_tokens": "write it into speculative_config",
    "speculative_ratio": "write num_speculative_tokens into speculative_config",
    "speculative_sampling": "write speculative_config, and leave it out",
}
"""Names that stand in guides and that vLLM does not have, or no longer, and what to write instead."""

_OWN_KEYS_OF_THE_DRAFTER = frozenset(DraftModelConfig.model_fields) | {"num_speculative_tokens"}
_IN_PROCESS_ONLY = ("disable_padded_drafter_batch",)
"""Keys of ``speculative_config`` that say how vLLM pads its own drafter's batch; a drafter actor has its own batch."""

_METHOD_OF_ARCHITECTURE = {
    "eagle3": "eagle3",
    "eagle": "eagle",
    "medusa": "medusa",
    "mlpspeculator": MLP_SPECULATOR,
    "-accelerator": MLP_SPECULATOR,  # IBM's names of their checkpoints
    "mtp": "mtp",
}
"""The method by a part of a draft checkpoint's architecture or name; the first that fits counts."""

_ONE_RANK_ONLY = ("draft_tensor_parallel_size", "tensor_parallel_size")
"""Keys that an MLP speculator has with the value 1 in vLLM's guides: it runs on one rank."""


def config_from_arguments(
    model: str,
    speculative_config: Mapping[str, Any] | None = None,
    *,
    serving: Mapping[str, Any] | None = None,
    openai: Mapping[str, Any] | None = None,
    **arguments: Any,
) -> OutriderConfig:
    """Returns the configuration for vLLM's engine arguments.

    Args:
        model: Checkpoint directory or hub id of the target.
        speculative_config: vLLM's, with the keys of the sections ``drafter`` and ``speculation`` beside it. Methods
            ``draft_model``, ``ngram`` and ``suffix`` run in a drafter actor, all others in the target's engine;
            ``placement`` says otherwise.
        serving, openai: these sections, for a server.
        **arguments: vLLM's engine arguments for the target.

    Raises:
        ConfigError: Names the argument.
    """
    for name in arguments:
        if (instead := NOT_ARGUMENTS.get(name)) is not None:
            raise ConfigError(f"{name}: is not an argument of vLLM's any more; {instead}")
    if arguments.pop("data_parallel_size", None) not in (None, 1):
        raise ConfigError(
            "data_parallel_size: one engine is one replica here; write `outrider serve MODEL --num-replicas N`, or "
            "make one LLM for each"
        )
    for name in IGNORED_ARGUMENTS:
        if arguments.pop(name, None) not in (None, False):
            logger.warning("%s is ignored: ranks are Ray actors, and statistics are always kept", name)
    method, draft_model, num_tokens = (arguments.pop(f"spec_{name}", None) for name in ("method", "model", "tokens"))
    aliases = {"method": method, "model": draft_model, "num_speculative_tokens": num_tokens}
    speculative = {**(speculative_config or {}), **{key: value for key, value in aliases.items() if value is not None}}

    target: dict[str, Any] = {"model": locate(model, "model"), "engine_args": {}}
    for name, value in arguments.items():
        (target if _is_key(TargetConfig, name) else target["engine_args"])[name] = value
    tree: dict[str, Any] = {"target": target}
    for name, section in (("serving", serving), ("openai", openai)):
        if section:
            tree[name] = dict(section)
    if (draft_checkpoint := speculative.get("model")) is not None:
        speculative["model"] = locate(str(draft_checkpoint), "speculative_config.model")
    if speculative:
        tree["drafter"], tree["speculation"] = _sections(speculative)
    try:
        return parse_config(tree, "arguments")
    except ConfigError as error:
        raise ConfigError(_by_argument(str(error))) from None


def _is_key(section: type[EngineConfig], name: str) -> bool:
    return name in section.model_fields and name not in ("model", "engine_args")


def _sections(speculative: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the sections ``drafter`` and ``speculation`` of vLLM's ``speculative_config``."""
    given = {key: value for key, value in speculative.items() if value is not None}
    speculation = {key: given.pop(key) for key in SPECULATION_KEYS if key in given}
    if "method" not in given:
        given["method"] = _method_of(given.get("model"))
    elif given["method"] == "mlp":  # the guides' short form
        given["method"] = MLP_SPECULATOR
    method = given["method"]
    if method == MLP_SPECULATOR:
        for name in _ONE_RANK_ONLY:
            if given.get(name) == 1:
                del given[name]
        return given, speculation
    placement = given.setdefault("placement", "with_target" if method in REMOTE_METHODS else "co_located")
    if method == "suffix":  # vLLM's default
        given.setdefault("num_speculative_tokens", given.get("suffix_decoding_max_tree_depth", 24))
    if placement == "co_located":
        return given, speculation
    for name in _IN_PROCESS_ONLY:
        given.pop(name, None)
    if method == "ngram":
        longest, shortest = given.get("prompt_lookup_max"), given.get("prompt_lookup_min")
        if longest is None and shortest is not None:
            given["prompt_lookup_max"] = shortest
        elif longest is not None and shortest is None:
            given["prompt_lookup_min"] = min(2, longest)
        return given, speculation
    if method == "draft_model":
        if "draft_tensor_parallel_size" in given:
            given["tensor_parallel_size"] = given.pop("draft_tensor_parallel_size")
        engine_args = dict(given.pop("engine_args", None) or {})
        for name in [name for name in given if name not in _OWN_KEYS_OF_THE_DRAFTER]:
            engine_args[name] = given.pop(name)
        given["engine_args"] = engine_args
    return given, speculation


def checkpoint_document(model: str) -> dict[str, Any]:
    """Returns the decoded config.json of a checkpoint directory; {} for a hub id."""
    path = Path(model).expanduser() / "config.json"
    document: dict[str, Any] = json.loads(path.read_bytes()) if path.is_file() else {}
    return document


def _method_of(model: Any) -> str:
    """Returns the method that a draft checkpoint is for, where none is named."""
    if model is None:
        raise ConfigError(
            "speculative_config.method: required, but missing; name one (draft_model, ngram, suffix, eagle3, mtp, ...)"
        )
    document = checkpoint_document(str(model))
    if (speculators := document.get("speculators_config")) is not None:
        return str(speculators.get("algorithm", "eagle3"))
    architectures = " ".join(document.get("architectures") or []) + " " + str(model)
    for word, method in _METHOD_OF_ARCHITECTURE.items():
        if word in architectures.lower():
            return method
    return "draft_model"


def _by_argument(error: str) -> str:
    """Returns a configuration's error under the names that the caller has written."""
    error = error.removeprefix("arguments: ")
    for section, name in (
        ("target.engine_args.", ""),
        ("target.", ""),
        ("drafter.engine_args.", "speculative_config."),
        ("drafter.", "speculative_config."),
        ("speculation.", "speculative_config."),
    ):
        if error.startswith(section):
            return name + error.removeprefix(section)
    return error
