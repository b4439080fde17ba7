"""Implements ``outrider distill``: trains a drafter of the target's own layers, or a given one, on its responses.

Exit status: 0 done, 1 it failed (one line on stderr says why), 130 interrupted: the same command goes on.
"""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

from outrider.cluster.config import ConfigError
from outrider.deploy.cli.arguments import add_device_arguments, exit_status, positive
from outrider.deploy.progress import Progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="TARGET", help="checkpoint directory or hub id")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="everything; a run there is resumed")
    parser.add_argument(
        "--data", type=Path, nargs="+", default=[], metavar="PROMPTS", help=".jsonl with prompt or messages"
    )
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument(
        "--kind",
        choices=("draft_model", "one_pass", "mlp"),
        default="draft_model",
        help="a draft model, one that drafts a round in one pass (PARD), or an MLP speculator",
    )
    kind.add_argument("--one-pass", dest="kind", action="store_const", const="one_pass", help="--kind one_pass")
    parser.add_argument("--k", type=positive, default=4, metavar="K", help="drafts a round, of an MLP its heads (4)")
    start = parser.add_mutually_exclusive_group()
    start.add_argument("--layers", type=positive, metavar="L", help="of the target's, to start from (default: 2)")
    start.add_argument("--from", dest="start", metavar="DRAFTER", help="train this one further")
    start.add_argument("--assemble", type=Path, metavar="STORED", help="train nothing: this stored drafter and TARGET")
    parser.add_argument("--steps", type=positive, default=2000, metavar="N", help="of training, in all (2000)")
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
    parser.add_argument("--bits", type=int, choices=(8, 16), default=16, help="of a stored value (16)")
    parser.add_argument("--seed", type=int, default=0)
    add_device_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Prints the assembled checkpoint's directory on stdout. Returns the exit status."""
    interrupted = "interrupted; the same command goes on from the last checkpoint"
    return exit_status("distill", lambda: print(_made(args), flush=True), interrupted=interrupted, verbose=args.verbose)


def _made(args: argparse.Namespace) -> Path:
    from transformers.utils import logging

    from outrider.deploy.distill.models import keep_large_blocks, locate
    from outrider.deploy.distill.run import Settings, distill
    from outrider.deploy.distill.stored import assemble

    if args.assemble:
        assemble(args.assemble, locate(args.target, "TARGET"), args.out)
        return Path(args.out)
    if not args.data:
        raise ConfigError("--data: no prompts; give at least one file")

    logging.disable_progress_bar()
    keep_large_blocks()
    same = {field.name: getattr(args, field.name) for field in fields(Settings)}
    layers = args.layers if args.start or args.kind == "mlp" else args.layers or 2
    settings = Settings(**{**same, "data": tuple(args.data), "layers": layers})
    return distill(settings, Progress())
