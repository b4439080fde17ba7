"""Implements the ``outrider`` command. Subcommands are imported when they run, so that help comes at once."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
import traceback
from collections.abc import Sequence

from outrider.cluster.installed import installed_version

COMMANDS = {
    "serve": "serve a target with its drafter until interrupted",
    "run-batch": "answer a file of requests (OpenAI's batch format) without a server",
    "generate": "ask a running server for one answer",
    "keys": "make and revoke API keys",
    "fetch": "get a model, or a preset's models, onto this machine",
    "distill": "train a drafter for a target, of the target's own layers, on what the target says",
    "acceptance": "measure how many of a draft model's tokens a target accepts, without a server",
    "doctor": "check a configuration against this machine before anything is loaded",
    "bench": "measure the load of vLLM's benchmark client, in turns with another server",
}
"""Maps each command to its summary. It is a module of this package with ``add_arguments(parser)`` and ``run(args)``."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand and returns its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal without a character shows a question mark
        sys.stdout.reconfigure(errors="replace")
    about = "Speculative decoding for vLLM on Ray."
    parser = argparse.ArgumentParser(prog="outrider", description=about, allow_abbrev=False)
    parser.add_argument(
        "--version", action="version", version=f"outrider {installed_version('outrider') or '(not installed)'}"
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    chosen = next((argument for argument in arguments if not argument.startswith("-")), None)
    try:
        for name, summary in COMMANDS.items():
            command = commands.add_parser(
                name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.", allow_abbrev=False
            )
            if name == chosen:
                importlib.import_module(f"outrider.deploy.cli.{name.replace('-', '_')}").add_arguments(command)
        args, flags = parser.parse_known_args(arguments)
        module = importlib.import_module(f"outrider.deploy.cli.{args.command.replace('-', '_')}")
        if flags and not getattr(module, "TAKES_FLAGS_OF_VLLM", False):
            commands.choices[args.command].error(f"unrecognized arguments: {' '.join(flags)}")
        args.flags = flags
        status = int(module.run(args))
        try:
            print(end="", flush=True)
        except BrokenPipeError:  # the reader of a pipe has ended
            _discard_output()
    except KeyboardInterrupt:
        return fail("interrupted", status=130)
    except BrokenPipeError:
        _discard_output()
        return 1
    return status


def _discard_output() -> None:
    """Redirects standard output, so that the interpreter's last flush cannot fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def fail(message: str, *, status: int = 1, verbose: bool = False) -> int:
    """Prints the one line of a command that failed, after the traceback if verbose. Returns the exit status."""
    if verbose:
        traceback.print_exc()
    print(f"outrider: {' '.join(message.split())}", file=sys.stderr, flush=True)
    return status
