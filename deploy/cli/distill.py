"""``outrider distill``: a drafter for a target, of its own layers or a given one, trained on what the target says.

Exit status: 0 done, 1 it failed (one line on stderr says why), 130 interrupted: the same command goes on.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from outrider.cluster.config import ConfigError
from outrider.deploy.argument_types import positive
from outrider.deploy.cli.models import add_device_arguments, exit_status
from outrider.deploy.progress import Progress

DEFAULT_MINUTES = 30.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="TARGET", help="checkpoint directory or hub id")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="everything; a run there is resumed")
    parser.add_argument(
        "--data", type=Path, nargs="+", default=[], metavar="PROMPTS", help=".txt, or .jsonl with prompt or messages"
    )
    start = parser.add_mutually_exclusive_group()
    start.add_argument("--layers", type=positive, metavar="L", help="of the target's, to start from (default: 2)")
    start.add_argument("--from", dest="start", metavar="DRAFTER", help="train this one further")
    start.add_argument("--assemble", type=Path, metavar="STORED", help="train nothing: this stored drafter and TARGET")
    parser.add_argument("--base", metavar="DRAFTER", help="with --assemble: what it was trained from, if not TARGET")
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument(
        "--minutes", type=float, metavar="M", help=f"in all, resumed or not, text included ({DEFAULT_MINUTES:g})"
    )
    budget.add_argument("--steps", type=positive, metavar="N", help="instead of minutes: training steps in all")
    parser.add_argument("--seq-len", type=positive, default=256, metavar="N", help="tokens of prompt and answer (256)")
    parser.add_argument("--answer-tokens", type=positive, default=128, metavar="N", help="of these the answer's (128)")
    parser.add_argument(
        "--samples", type=positive, default=2, metavar="N", help="answers a prompt: one greedy, the rest drawn (2)"
    )
    parser.add_argument("--chat", action="store_true", help="a prompt is a user's message, not a text to continue")
    parser.add_argument(
        "--draft-vocab-size", type=positive, metavar="V", help="train on the V likeliest tokens (default: all)"
    )
    parser.add_argument("--learning-rate", type=float, default=1e-3, metavar="R", help="the highest (0.001)")
    parser.add_argument("--batch-size", type=positive, default=8, metavar="N", help="texts a step (8)")
    parser.add_argument(
        "--bits",
        type=int,
        choices=(8, 16),
        default=16,
        help="of a stored value: 8 halves the file alone (16)",
    )
    parser.add_argument(
        "--own-share",
        type=float,
        default=0.25,
        metavar="S",
        help="of the steps, on the drafter's own tokens (0.25)",
    )
    parser.add_argument("--seed", type=int, default=0)
    add_device_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Prints the assembled checkpoint's directory on stdout. Returns the exit status."""
    progress = Progress()

    def work() -> None:
        print(_assembled(args) if args.assemble else _trained(args, progress), flush=True)

    interrupted = "interrupted; the same command goes on from the last checkpoint"
    return exit_status("distill", work, interrupted=interrupted, verbose=args.verbose)


def _assembled(args: argparse.Namespace) -> Path:
    from outrider.deploy.distill.models import locate
    from outrider.deploy.distill.stored import assemble

    base = locate(args.base, "--base") if args.base else None
    assemble(args.assemble, locate(args.target, "TARGET"), args.out, base)
    return Path(args.out)


def _trained(args: argparse.Namespace, progress: Progress) -> Path:
    if not args.data:
        raise ConfigError("--data: no prompts; give at least one file")
    if args.answer_tokens >= args.seq_len:
        raise ConfigError(f"--answer-tokens: {args.answer_tokens} leave a prompt no room in --seq-len {args.seq_len}")
    # Written so that NaN fails.
    for option, value in (("--minutes", args.minutes), ("--learning-rate", args.learning_rate)):
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{option}: {value:g} is not a finite number above 0")
    if not 0 <= args.own_share <= 1:
        raise ConfigError(f"--own-share: {args.own_share:g} is not in 0 to 1")
    from transformers.utils import logging

    from outrider.deploy.distill import memory
    from outrider.deploy.distill.run import Settings, distill

    logging.disable_progress_bar()
    memory.keep_large_blocks()
    minutes = DEFAULT_MINUTES if args.minutes is None and args.steps is None else args.minutes
    settings = Settings(
        target=args.target,
        data=tuple(args.data),
        out=args.out,
        layers=args.layers if args.start else args.layers or 2,
        start=args.start,
        minutes=minutes,
        steps=args.steps,
        seq_len=args.seq_len,
        answer_tokens=args.answer_tokens,
        samples=args.samples,
        chat=args.chat,
        draft_vocab_size=args.draft_vocab_size,
        learning_rate=args.learning_rate,
        batch_size=args.batch_size,
        seed=args.seed,
        device=args.device,
        dtype=args.dtype,
        own_share=args.own_share,
        bits=args.bits,
    )
    return distill(settings, progress)
