"""Implements ``outrider acceptance``: measures which draft tokens a target accepts, by position, without a server.

Exit status: 0 measured, 1 it failed (one line on stderr says why), 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from outrider.deploy.cli.arguments import add_device_arguments, check_can_write, exit_status, positive


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="TARGET", help="checkpoint directory or hub id")
    parser.add_argument("drafter", metavar="DRAFTER", help="likewise, of a draft model or MLP speculator")
    parser.add_argument("--dataset", type=Path, required=True, metavar="FILE", help=".jsonl with prompt or messages")
    parser.add_argument("--limit", type=positive, metavar="N", help="prompts, evenly spread over the file (all)")
    parser.add_argument("--chat", action="store_true", help="a prompt is a user's message, not a text to continue")
    parser.add_argument("--k", type=positive, default=4, metavar="K", help="drafts a round (4)")
    parser.add_argument("--max-tokens", type=positive, default=128, metavar="N", help="of an answer (128)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the whole report")
    add_device_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measures and reports. Returns the exit status."""
    return exit_status("acceptance", lambda: _report(args), verbose=args.verbose)


def _report(args: argparse.Namespace) -> None:
    if args.json is not None:
        check_can_write("--json", args.json)
    from transformers.utils import logging

    from outrider.deploy.distill.measure import measure, table
    from outrider.deploy.distill.models import device_and_dtype, keep_large_blocks, locate
    from outrider.deploy.distill.prompts import read_prompts

    data = read_prompts(args.dataset, "--dataset")
    logging.disable_progress_bar()
    keep_large_blocks()
    device, dtype = device_and_dtype(args.device, args.dtype)
    report = measure(
        target=locate(args.target, "TARGET"),
        drafter=locate(args.drafter, "DRAFTER"),
        data=data,
        device=device,
        dtype=dtype,
        **{name: getattr(args, name) for name in ("limit", "chat", "k", "max_tokens")},
    )
    print(table(report), flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n")
