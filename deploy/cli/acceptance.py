"""``outrider acceptance``: how many of a drafter's tokens a target accepts, by position, without a server.

Exit status: 0 measured, 1 it failed (one line on stderr says why), 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from outrider.actors.learning.rounds import StepTimes
from outrider.cluster.config import CoLocatedConfig, ConfigError, DraftModelConfig
from outrider.deploy.argument_types import positive
from outrider.deploy.bench.plot import check_plot
from outrider.deploy.cli.models import add_device_arguments, check_can_write, exit_status
from outrider.deploy.preset import resolve_config
from outrider.deploy.progress import Progress

DEFAULT_K = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", nargs="?", metavar="TARGET", help="checkpoint directory or hub id")
    parser.add_argument("drafter", nargs="?", metavar="DRAFTER", help="likewise, of a draft model")
    parser.add_argument(
        "--preset", metavar="PRESET_OR_FILE", help="target, drafter and K of this configuration instead"
    )
    parser.add_argument(
        "--dataset", type=Path, required=True, metavar="FILE", help=".txt, or .jsonl with prompt or messages; gzip too"
    )
    parser.add_argument("--limit", type=positive, metavar="N", help="prompts, evenly spread over the file (all)")
    parser.add_argument("--chat", action="store_true", help="a prompt is a user's message, not a text to continue")
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="above 0: answers drawn at T are measured too (0)"
    )
    parser.add_argument("--k", type=positive, metavar="K", help=f"drafts a round (the preset's, or {DEFAULT_K})")
    parser.add_argument(
        "--draft-vocab-size",
        type=int,
        metavar="V",
        help="cut the drafter's head to V tokens, 0: not at all (as it is served: the preset's, or the default)",
    )
    parser.add_argument("--max-tokens", type=positive, default=128, metavar="N", help="of an answer (128)")
    parser.add_argument("--seed", type=int, default=0, help="of draws")
    parser.add_argument("--target-ms", type=float, metavar="MS", help="a step of the target's, for expected speed-ups")
    parser.add_argument("--draft-ms", type=float, metavar="MS", help="a step of the drafter's, likewise")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the whole report")
    parser.add_argument("--plot", type=Path, metavar="OUT.png", help="write a picture; needs matplotlib")
    add_device_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and report. Returns the exit status."""
    return exit_status("acceptance", lambda: _report(args, Progress()), verbose=args.verbose)


def _report(args: argparse.Namespace, progress: Progress) -> None:
    _check(args)
    report = _measure(args, progress)
    from outrider.deploy.distill.measure import table

    print(table(report), flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n")
        progress.say(f"wrote {args.json}")
    if args.plot is not None:
        from outrider.deploy.distill.plot import draw_acceptance

        draw_acceptance(report, args.plot)
        progress.say(f"wrote {args.plot}")


def _check(args: argparse.Namespace) -> None:
    """Raise ConfigError for what is wrong with the command line alone."""
    if args.preset is None and args.drafter is None:
        raise ConfigError("give TARGET and DRAFTER, or --preset")
    if args.preset is not None and args.target is not None:
        raise ConfigError("--preset: it has a target and a drafter; leave TARGET and DRAFTER out")
    if args.temperature < 0:
        raise ConfigError(f"--temperature: {args.temperature:g} is below 0")
    if args.draft_vocab_size is not None and args.draft_vocab_size < 0:
        raise ConfigError(f"--draft-vocab-size: {args.draft_vocab_size} is below 0")
    if (args.target_ms is None) != (args.draft_ms is None):
        raise ConfigError("--target-ms and --draft-ms: give both, or neither")
    if args.target_ms is not None and (args.target_ms <= 0 or args.draft_ms < 0):
        raise ConfigError("--target-ms and --draft-ms: milliseconds above 0 (--draft-ms 0 for a look-up)")
    if args.plot is not None:
        check_plot(args.plot)
    for option, path in (("--json", args.json), ("--plot", args.plot)):
        if path is not None:
            check_can_write(option, path)


def _measure(args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    from transformers.utils import logging

    from outrider.deploy.distill import memory
    from outrider.deploy.distill.look_ups import LookUp, look_up_of
    from outrider.deploy.distill.measure import Settings, measure
    from outrider.deploy.distill.models import locate
    from outrider.deploy.distill.prompts import read_prompts
    from outrider.deploy.distill.run import device_of, dtype_of

    logging.disable_progress_bar()
    memory.keep_large_blocks()
    drafter: Path | LookUp
    beside: tuple[str, ...] = ()
    k, device, cut_to = args.k, device_of(args.device), args.draft_vocab_size
    if args.preset is None:
        target, drafter = locate(args.target, "TARGET"), locate(args.drafter, "DRAFTER")
    else:
        config = resolve_config(args.preset)
        target = locate(config.target.model, "--preset")
        of_config = config.drafter
        if isinstance(of_config, DraftModelConfig) or (
            isinstance(of_config, CoLocatedConfig) and of_config.method == "draft_model"
        ):
            drafter = locate(str(of_config.model), "--preset")
            cut_to = _cut_to(of_config) if cut_to is None else cut_to
            beside = tuple(of_config.beside) if isinstance(of_config, DraftModelConfig) else ()
        else:
            drafter = look_up_of(of_config)
        k = k or config.speculation.num_speculative_tokens
    settings = Settings(
        target=target,
        drafter=drafter,
        data=read_prompts(args.dataset, "--dataset"),
        limit=args.limit,
        chat=args.chat,
        temperature=args.temperature,
        k=k or DEFAULT_K,
        max_tokens=args.max_tokens,
        seed=args.seed,
        times=None if args.target_ms is None else StepTimes(args.target_ms, args.draft_ms),
        device=device,
        dtype=dtype_of(args.dtype, args.device),
        beside=beside,
        draft_vocab_size=0 if cut_to is None and device != "cpu" else cut_to,
    )
    return measure(settings, progress)


def _cut_to(drafter: DraftModelConfig | CoLocatedConfig) -> int | None:
    """As drafter.draft_vocab_size has it. In the target's own engine the head is whole, and by default on several
    ranks."""
    if not isinstance(drafter, DraftModelConfig):
        return 0
    return 0 if drafter.draft_vocab_size is None and drafter.tensor_parallel_size > 1 else drafter.draft_vocab_size
