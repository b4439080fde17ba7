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
    _open_closed_streams()
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
                importlib.import_module(f"outrider.deploy.cli.{_module(name)}").add_arguments(command)
        args, flags = parser.parse_known_args(arguments)
        module = importlib.import_module(f"outrider.deploy.cli.{_module(args.command)}")
        if flags and not getattr(module, "TAKES_FLAGS_OF_VLLM", False):
            commands.choices[args.command].error(_unrecognized(flags, commands.choices[args.command]))
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


def _unrecognized(words: Sequence[str], command: argparse.ArgumentParser) -> str:
    """Returns what is wrong with words that a command does not take, and the arguments that they may stand for."""
    known = {option: option for action in command._actions for option in action.option_strings}
    known |= {
        f"--{action.dest}": f"{action.metavar} without a flag"
        for action in command._actions
        if not action.option_strings
    }
    names = [word.partition("=")[0].replace("_", "-") for word in words]
    meant = list(dict.fromkeys(known[name] for name in names if name in known))
    return f"unrecognized arguments: {' '.join(words)}" + (f"; write {', '.join(meant)}" if meant else "")


def _open_closed_streams() -> None:
    """Opens the null device in place of standard streams that the caller has closed. Other files would get their
    numbers."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode)  # noqa: SIM115 - it stays open
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


def _module(command: str) -> str:
    return command.replace("-", "_")


def _discard_output() -> None:
    """Redirects standard output, so that the interpreter's last flush cannot fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def fail(message: str, *, status: int = 1, verbose: bool = False) -> int:
    """Prints the one line of a command that failed, after the traceback if verbose. Returns the exit status."""
    if verbose:
        traceback.print_exc()
    print(f"outrider: {' '.join(message.split())}", file=sys.stderr, flush=True)
    return status
