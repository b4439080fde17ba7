"""``outrider prompts``: prompts that a chat model makes up itself, for ``distill`` and for measuring acceptance.

Exit status: 0 done, 1 it failed (one line on stderr says why), 130 interrupted.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from outrider.deploy.argument_types import positive
from outrider.deploy.cli.models import add_device_arguments, check_can_write, exit_status
from outrider.deploy.progress import Progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="TARGET", help="checkpoint directory or hub id, of a chat model")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="a new .jsonl, a prompt a line")
    parser.add_argument("--count", type=positive, default=2000, metavar="N", help="prompts (2000)")
    parser.add_argument("--prompt-tokens", type=positive, default=96, metavar="N", help="of the longest (96)")
    parser.add_argument("--seed", type=int, default=0)
    add_device_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Prints the file's name on stdout. Returns the exit status."""
    from outrider.deploy.distill.invented import Settings, invent
    from outrider.deploy.distill.run import device_of, dtype_of

    def work() -> None:
        device = device_of(args.device)
        dtype = str(dtype_of(args.dtype, device)).removeprefix("torch.")
        if args.out.suffix == ".jsonl" and not args.out.exists():
            check_can_write("--out", args.out)
        settings = Settings(args.target, args.out, args.count, args.prompt_tokens, args.seed, device, dtype)
        print(invent(settings, Progress()), flush=True)

    return exit_status("prompts", work, verbose=args.verbose)
