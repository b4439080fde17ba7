"""Reads the flags of ``vllm serve MODEL`` into an Outrider configuration."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from outrider.cluster.config import ConfigError, OutriderConfig
from outrider.deploy.llm.arguments import checkpoint_document, config_from_arguments

_GATEWAY = {"host": "host", "port": "http_port", "grpc_port": "grpc_port"}
_TLS = {"ssl_certfile": "certificate", "ssl_keyfile": "key", "ssl_ca_certs": "client_ca"}
_SERVING = ("served_model_name", "api_key", "allowed_origins", "otlp_traces_endpoint", "num_replicas")
_LISTS_OF_ONE = ("served_model_name", "api_key")
_OPENAI_KEYS_OF_THE_ENGINE = ("reasoning_parser",)
_SHORT_FOR_THE_DRAFTER = {"tensor_parallel_size": "draft_tensor_parallel_size", "placement": "placement"}

_HAVE_NO_EFFECT = {
    "headless": "replicas are Ray's; set --num-replicas",
    "api_server_count": "set serving.num_ingresses in a configuration file",
    "grpc": "gRPC is always served; set --grpc-port",
    "uds": "the gateway listens on a port; set --host and --port",
    "root_path": "set it at the proxy in front",
}


def add_own_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that vLLM does not have."""
    group = parser.add_argument_group("drafter, with a MODEL in place of a configuration")
    group.add_argument("--drafter-tensor-parallel-size", type=int, metavar="N", help="ranks of the draft model")
    group.add_argument(
        "--drafter-placement",
        choices=("with_target", "pool", "co_located"),
        help="beside each target (default), shared by all targets, or inside the target's engine",
    )
    group.add_argument("--num-replicas", type=int, metavar="N", help="target replicas")
    parser.epilog = (
        "With a MODEL (hub id or directory), every flag of `vllm serve` is taken under vLLM's name, for example "
        "--tensor-parallel-size, --speculative-config, --max-model-len or --enable-auto-tool-choice."
    )


def given_own_flags(own: argparse.Namespace) -> list[str]:
    """Returns those of the flags of ``add_own_flags`` that are given, as they are written."""
    names = ("drafter_tensor_parallel_size", "drafter_placement", "num_replicas")
    return [f"--{name.replace('_', '-')}" for name in names if getattr(own, name, None) is not None]


def config_from_flags(model: str, own: argparse.Namespace, flags: Sequence[str]) -> OutriderConfig:
    """Returns the configuration for ``MODEL`` and vLLM's flags. Imports vLLM, which reads and checks them.

    Args:
        model: Hub id or directory of the target, or of a speculator whose ``speculators_config`` names the target.
        own: Values of the flags of ``add_own_flags`` and of ``--drafter``, ``--dtype``, ``--grpc-port``,
            ``--http-port``.
        flags: The other words of the command line.

    Raises:
        ConfigError: Names the flag.
    """
    given = _parsed(flags)
    serving: dict[str, Any] = {}
    gateway: dict[str, Any] = {}
    openai: dict[str, Any] = {}
    frontend = _frontend_names()
    for name, value in list(given.items()):
        if (instead := _HAVE_NO_EFFECT.get(name)) is not None:
            raise ConfigError(f"--{name.replace('_', '-')}: has no effect here; {instead}")
        if name in _LISTS_OF_ONE and isinstance(value, list):
            if len(value) > 1:
                raise ConfigError(f"--{name.replace('_', '-')}: takes one value here, found {len(value)}")
            value = given[name] = value[0]
        if name in _GATEWAY:
            gateway[_GATEWAY[name]] = given.pop(name)
        elif name in _TLS:
            gateway.setdefault("tls", {})[_TLS[name]] = given.pop(name)
        elif name in _SERVING:
            serving[name] = given.pop(name)
        elif name == "lora_modules":
            given[name] = [{"name": each.name, "path": each.path} for each in value]
        elif name in frontend or name in _OPENAI_KEYS_OF_THE_ENGINE:
            openai[name] = given.pop(name)
    for name, key in (("http_port", "http_port"), ("grpc_port", "grpc_port")):
        if (value := getattr(own, name, None)) is not None:
            gateway[key] = value
    if gateway:
        serving["gateway"] = gateway
    if own.num_replicas is not None:
        serving["num_replicas"] = own.num_replicas
    if own.dtype is not None:
        given["dtype"] = own.dtype
    speculative = dict(given.pop("speculative_config", None) or {})
    if own.drafter is not None:
        speculative |= {"method": speculative.get("method", "draft_model"), "model": own.drafter}
    for name, key in _SHORT_FOR_THE_DRAFTER.items():
        if (value := getattr(own, f"drafter_{name}")) is not None:
            if not speculative and not any(f"spec_{each}" in given for each in ("method", "model")):
                raise ConfigError(f"--drafter-{name.replace('_', '-')}: there is no drafter; add --drafter MODEL")
            speculative[key] = value
    if (found := speculator(model)) is not None:
        target, of_the_checkpoint = found
        model, speculative = target, {**of_the_checkpoint, **speculative}
    try:
        return config_from_arguments(model, speculative, serving=serving, openai=openai, **given)
    except ConfigError as error:
        name = re.split(r"[.:]", str(error), maxsplit=1)[0]
        if name not in given and name != "speculative_config":
            raise
        raise ConfigError(f"--{name.replace('_', '-')}{str(error).removeprefix(name)}") from None


def speculator(model: str) -> tuple[str, dict[str, Any]] | None:
    """Returns the target and vLLM's ``speculative_config`` of a speculator's checkpoint. None: it is no speculator.

    Such a checkpoint's ``config.json`` has a ``speculators_config`` with algorithm, verifier and number of tokens
    (https://github.com/vllm-project/speculators).
    """
    section = checkpoint_document(model).get("speculators_config")
    if not isinstance(section, Mapping):
        return None
    target = (section.get("verifier") or {}).get("name_or_path")
    if not target:
        raise ConfigError(f"{model}/config.json: speculators_config.verifier.name_or_path: required, but missing")
    proposals = section.get("proposal_methods") or [{}]
    speculative = {"method": section.get("algorithm", "eagle3"), "model": model}
    if (number := proposals[0].get("speculative_tokens")) is not None:
        speculative["num_speculative_tokens"] = number
    return target, speculative


def _parsed(flags: Sequence[str]) -> dict[str, Any]:
    """Returns the values of the flags that are given, by vLLM's names, read and checked by vLLM's parser."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser(prog="outrider serve MODEL", add_help=False))
    for action in parser._actions:
        action.default = argparse.SUPPRESS
        if action.type is not None:
            action.type = _plain(action.type)
    given = vars(parser.parse_args(list(flags)))
    for name in ("model_tag", "config"):
        given.pop(name, None)
    return given


def _plain(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Has a flag that stands for a whole configuration checked by vLLM, and kept as the mapping that was written."""

    def parse(text: str) -> Any:
        value = read(text)
        return json.loads(text) if dataclasses.is_dataclass(value) and text.lstrip().startswith("{") else value

    parse.__name__ = getattr(read, "__name__", "value")
    return parse


def _frontend_names() -> frozenset[str]:
    from vllm.entrypoints.launchers.cli_args import FrontendArgs

    return frozenset(field.name for field in dataclasses.fields(FrontendArgs))
