"""The arguments of ``outrider bench``, and the settings of a run that they are."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider.cluster.config import ConfigError, DraftModelConfig, OutriderConfig, parse_config
from outrider.deploy.argument_types import address, positive
from outrider.deploy.bench.load import Ask, Dataset

SIDES = ("plain", "vllm")

DEFAULT_KS = (2, 3, 4, 6)

CoreSets = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Load:
    """The closed loop: ``concurrency`` requests are under way until the prompts run out."""

    concurrency: int
    temperature: float
    max_tokens: int
    seed: int
    repeats: int
    chunk: int
    """Prompts a turn."""

    ignore_eos: bool
    verification: str | None
    """Of our side; None: what the deployment does."""

    def asks(self, dataset: Dataset, indices: Sequence[int]) -> list[Ask]:
        """One repeat's work. A prompt's seed is ``seed`` plus its place among ``indices``, the same in every repeat."""
        return [
            Ask(
                index,
                dataset.prompts[index],
                self.max_tokens,
                self.temperature,
                self.seed + place if self.temperature > 0 else None,
                self.ignore_eos,
            )
            for place, index in enumerate(indices)
        ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    ours = parser.add_argument_group("our side")
    which = ours.add_mutually_exclusive_group(required=True)
    which.add_argument("--preset", metavar="NAME", help="serve this preset while the benchmark runs")
    which.add_argument("--config", metavar="FILE", help="likewise, a YAML file")
    which.add_argument("--address", metavar="HOST:PORT", type=address, help="ask this server; none is started")
    ours.add_argument("--target", metavar="PATH", help="checkpoint directory (or hub id) in place of target.model")
    ours.add_argument("--drafter", metavar="PATH", help="likewise for drafter.model")
    ours.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), help="of target and draft model")
    ours.add_argument(
        "--target-cores", metavar="IDS", type=core_sets, help="in place of target.cores, e.g. 0 or 0,1|2,3"
    )
    ours.add_argument("--drafter-cores", metavar="IDS", type=core_sets, help="likewise for drafter.cores")
    _add_load(parser.add_argument_group("load"))
    other = parser.add_argument_group("the side to compare with")
    other.add_argument(
        "--against",
        metavar="plain|vllm|FILE",
        type=_against,
        help="plain: the target without drafter; vllm: vLLM's in-process draft_model; "
        "FILE.yaml: another server of ours, with the same --target and --drafter",
    )
    other.add_argument("--against-k", metavar="K,K", type=_numbers, default=DEFAULT_KS,
                       help="vllm: K to try first; a single one is taken untried (default: 2,3,4,6)")  # fmt: skip
    other.add_argument("--other-cores", metavar="IDS", type=core_sets,
                       help="of the other side's model (default: all of ours, or one fewer if faster)")  # fmt: skip
    other.add_argument("--other-compile", action="store_true",
                       help="let the other side compile: minutes of start-up for a few per cent")  # fmt: skip
    output = parser.add_argument_group("output (a table goes to stdout in any case)")
    output.add_argument("--json", metavar="FILE", type=Path, help="everything that was measured")
    output.add_argument("--plot", metavar="FILE.png", type=Path, help="tokens per second by chunk, and a round's time")
    output.add_argument("--verbose", action="store_true", help="show the logs of Ray and vLLM, and stack traces")


def _add_load(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--dataset", metavar="FILE", type=Path, required=True,
                       help="JSONL with a field prompt, .gz or not")  # fmt: skip
    group.add_argument("--prompts", metavar="N", type=positive, help="use N of them, evenly spread (default: all)")
    group.add_argument("--concurrency", metavar="C", type=positive, default=1, help="requests under way (default: 1)")
    group.add_argument("--temperature", metavar="T", type=_temperature, default=0.0,
                       help="0 is greedy (default); above, prompt number i gets seed S + i on both sides")  # fmt: skip
    group.add_argument("--max-tokens", metavar="N", type=positive, default=128, help="of an answer (default: 128)")
    group.add_argument("--ignore-eos", action="store_true", help="answers of exactly --max-tokens tokens")
    group.add_argument("--verification", choices=("rejection", "block", "coupled"),
                       help="of our side (default: the deployment's, coupled for what has a seed)")  # fmt: skip
    group.add_argument("--repeats", metavar="R", type=positive, default=1, help="passes over the prompts (default: 1)")
    group.add_argument("--seed", metavar="S", type=_seed, default=0, help="(default: 0)")
    group.add_argument("--chunk", metavar="N", type=positive,
                       help="prompts a turn, at most (default: 2 x C, at least 4)")  # fmt: skip


def load_of(args: argparse.Namespace) -> Load:
    return Load(
        concurrency=args.concurrency,
        temperature=args.temperature,
        max_tokens=args.max_tokens,
        seed=args.seed,
        repeats=args.repeats,
        chunk=args.chunk or max(2 * args.concurrency, 4),
        ignore_eos=args.ignore_eos,
        verification=args.verification,
    )


def check_comparison(args: argparse.Namespace, config: OutriderConfig | None) -> None:
    """Raise ConfigError where the other side cannot be what was asked for. config: of the models, when it is known."""
    if args.against is None:
        if given := [option for option in ("other_cores", "other_compile") if getattr(args, option)]:
            raise ConfigError(f"--{given[0].replace('_', '-')}: there is no other side; add --against plain or vllm")
        return
    if config is None:
        raise ConfigError(
            f"--against {args.against}: with --address the other side's models are not known; add --target PATH"
            + (" and --drafter PATH" if args.against == "vllm" else "")
        )
    if args.against not in SIDES:
        if args.address is not None:
            raise ConfigError(
                "--against FILE: both servers are started here; leave --address out, give --preset or --config"
            )
        if given := [option for option in ("other_cores", "other_compile") if getattr(args, option)]:
            raise ConfigError(f"--{given[0].replace('_', '-')}: {args.against} says it; write it there")
    if args.against == "vllm" and not isinstance(config.drafter, DraftModelConfig):
        has = f"is of method {config.drafter.method}" if config.drafter else "is not configured"
        raise ConfigError(
            f"--against vllm: vLLM's in-process draft_model needs a drafter model, and the drafter {has}; "
            "use a preset with one (qwen-coder), give --drafter PATH with --address, or compare with --against plain"
        )


def with_cores(config: OutriderConfig, target: CoreSets | None, drafter: CoreSets | None) -> OutriderConfig:
    """The configuration with cores from the command line. Raises ConfigError by field."""
    tree = config.model_dump()
    for section, sets in (("target", target), ("drafter", drafter)):
        if sets is not None:
            if tree[section] is None:
                raise ConfigError(f"--{section}-cores: there is no {section} section; leave it out")
            tree[section]["cores"] = [list(cores) for cores in sets]
    return parse_config(tree, "command line")


def core_sets(text: str) -> CoreSets:
    """``0,1`` or ``0-3`` is one set of cores; sets of several ranks stand between bars, as in ``0,1|2,3``."""
    try:
        return tuple(tuple(core for part in rank.split(",") for core in _range(part)) for rank in text.split("|"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of core ids such as 0,1 or 0-3 or 0,1|2,3") from None


def _range(text: str) -> range:
    first, dash, last = text.strip().partition("-")
    cores = range(int(first), int(last if dash else first) + 1)
    if not cores:
        raise ValueError(text)
    return cores


def _against(text: str) -> str:
    if text not in SIDES and not text.endswith((".yaml", ".yml")):
        raise argparse.ArgumentTypeError(f"{text!r} is neither plain nor vllm nor a YAML file")
    return text


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(positive(part) for part in text.split(",")))


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= 2.0:  # not a number is refused, too
        raise argparse.ArgumentTypeError(f"{text} is not a temperature from 0 to 2")
    return value


def _seed(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 0 up")
    return int(text)
