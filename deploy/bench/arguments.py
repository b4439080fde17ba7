"""Defines the arguments of ``outrider bench``: ours for the two sides, vLLM's own for the load."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

from outrider.cluster.config import ConfigError, OutriderConfig, parse_config
from outrider.cluster.vocabulary import mask_token
from outrider.deploy.cli.arguments import address, positive

DEFAULT_KS = (2, 3, 4, 6)

ONE_PASS_KS = (4, 8, 12, 16)
"""Drafts that cost one pass pay further out."""

PASSED_ON = {
    "--dataset-name": ("custom", "data set by vLLM's name: custom, sharegpt, speed_bench, random, hf, …"),
    "--dataset-path": (None, "file, directory or hub id of the data set; custom: .jsonl with a field prompt"),
    "--num-prompts": ("32", "requests a turn"),
    "--max-concurrency": ("1", "requests under way"),
    "--request-rate": (None, "requests a second; left out: each as soon as there is room"),
    "--output-len": ("128", "tokens of an answer, at most"),
    "--temperature": ("0", "0 is greedy"),
    "--seed": ("0", "chooses the prompts; each round has other ones"),
}
"""Options of ``vllm bench serve`` in our help, with default and meaning."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    ours = parser.add_argument_group("our side")
    which = ours.add_mutually_exclusive_group(required=True)
    which.add_argument("--preset", metavar="NAME", help="serve this preset while the benchmark runs")
    which.add_argument("--config", metavar="FILE", help="likewise, a YAML file")
    which.add_argument("--address", metavar="HOST:PORT", type=address,
                       help="HTTP port of a running server (https://HOST:PORT with TLS); none is started")  # fmt: skip
    ours.add_argument("--target", metavar="PATH", help="checkpoint directory (or hub id) in place of target.model")
    ours.add_argument("--drafter", metavar="PATH", help="likewise for drafter.model")
    ours.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), help="of target and draft model")
    ours.add_argument("--target-cores", metavar="IDS", type=core_sets,
                      help="in place of target.cores, e.g. 0 or 0,1|2,3")  # fmt: skip
    ours.add_argument("--drafter-cores", metavar="IDS", type=core_sets, help="likewise for drafter.cores")
    _add_other(parser.add_argument_group("the side to compare with"))
    load = parser.add_argument_group("load", "Options of `vllm bench serve`; any others of its follow a --.")
    for option, (default, text) in PASSED_ON.items():
        load.add_argument(option, metavar="X", default=default, help=text + (f" ({default})" if default else ""))
    load.add_argument("--rounds", metavar="R", type=positive, default=5, help="turns of each side (5)")
    load.add_argument("load_options", nargs="*", metavar="-- OPTION", help="further options of `vllm bench serve`")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write everything that was measured")
    parser.add_argument("--verbose", action="store_true", help="show the logs of Ray and vLLM, and stack traces")


def _add_other(other: argparse._ArgumentGroup) -> None:
    other.add_argument("--against", metavar="plain|vllm|FILE|HOST:PORT", type=_against,
                       help="plain: `vllm serve` without drafts; vllm: `vllm serve` drafting in-process; FILE.yaml: "
                       "another server of ours; HOST:PORT: a running server")  # fmt: skip
    other.add_argument("--against-config", metavar="JSON", type=json.loads, action="append",
                       help="vllm: a speculative_config of vLLM's to try, without num_speculative_tokens; may be given "
                       "several times (default: our drafter, and one-pass where it was made for that)")  # fmt: skip
    other.add_argument("--against-k", metavar="K,K", type=_numbers,
                       help="vllm: numbers of drafts to try, of which the fastest runs (2,3,4,6; one-pass "
                       "4,8,12,16)")  # fmt: skip
    other.add_argument("--other-cores", metavar="IDS", action="append",
                       help="VLLM_CPU_OMP_THREADS_BIND of vLLM's server, e.g. 0,1 or 0-3|4-7; given several times, "
                       "each is tried (all of ours)")  # fmt: skip
    other.add_argument("--other-args", metavar="ARGS", type=shlex.split, default=[],
                       help="further arguments of `vllm serve`, in quotes")  # fmt: skip


def load_options(args: argparse.Namespace) -> list[str]:
    """Returns the command line of vLLM's benchmark client, without the server's address."""
    given = {option: getattr(args, option.removeprefix("--").replace("-", "_")) for option in PASSED_ON}
    return [
        part for option, value in given.items() if value is not None for part in (option, value)
    ] + args.load_options


def check(args: argparse.Namespace) -> None:
    """Raises ConfigError for missing or contradictory arguments, before anything is loaded."""
    if args.against in ("plain", "vllm") and args.address is not None:
        raise ConfigError(
            f"--against {args.against}: the models at --address are not known; start the other server too"
        )
    if args.dataset_path is None and args.dataset_name == "custom":
        raise ConfigError("--dataset-path: give a .jsonl file with a field prompt, or another --dataset-name")


def candidates(args: argparse.Namespace, config: OutriderConfig) -> list[dict[str, Any] | None]:
    """Returns the values of vLLM's speculative_config to try; None is no speculation. Raises ConfigError."""
    if args.against == "plain":
        return [None]
    kinds = args.against_config or _as_ours(config.drafter)
    return [
        {**kind, "num_speculative_tokens": k}
        for kind in kinds
        for k in args.against_k or (ONE_PASS_KS if kind.get("parallel_drafting") else DEFAULT_KS)
    ]


def _as_ours(drafter: Any) -> list[dict[str, Any]]:
    method = getattr(drafter, "method", None)
    if method in ("ngram", "suffix"):
        fields = ("prompt_lookup_min", "prompt_lookup_max")
        return [{"method": method, **{name: getattr(drafter, name) for name in fields if hasattr(drafter, name)}}]
    if method != "draft_model":
        raise ConfigError(
            f"--against vllm: the drafter's method is {method}, for which vLLM has no counterpart; "
            "give --against-config, or compare with --against plain"
        )
    kind = {"method": "draft_model", "model": drafter.model}
    return [kind, {**kind, "parallel_drafting": True}] if drafts_in_one_pass(drafter.model) else [kind]


def drafts_in_one_pass(model: str) -> bool:
    """Returns whether a checkpoint, or one on the hub, has a mask token, which vLLM's parallel_drafting needs."""
    from transformers import PretrainedConfig

    try:
        known, _ = PretrainedConfig.get_config_dict(model)
    except OSError:  # nowhere to be found, as the server will say
        return False
    return mask_token(known) is not None


def with_cores(config: OutriderConfig, **sets: list[list[int]] | None) -> OutriderConfig:
    """Returns the configuration with cores from the command line, by section. Raises ConfigError."""
    tree = config.model_dump()
    for section, cores in sets.items():
        if cores is not None:
            if tree[section] is None:
                raise ConfigError(f"--{section}-cores: there is no {section} section; leave it out")
            tree[section]["cores"] = cores
    return parse_config(tree, "command line")


def core_sets(text: str) -> list[list[int]]:
    """Parses the cores of each rank, as in ``0,1|2,3``."""
    return [[int(core) for core in rank.split(",")] for rank in text.split("|")]


def _against(text: str) -> str:
    if text in ("plain", "vllm") or text.endswith((".yaml", ".yml")):
        return text
    try:
        return address(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither plain nor vllm nor a YAML file nor HOST:PORT") from None


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(positive(part) for part in text.split(",")))
