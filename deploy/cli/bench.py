"""Implements ``outrider bench``: the load of vLLM's benchmark client on our server, in turns with another one.

Exit status: 0 measured, 1 it failed (one line on stderr says why), 2 the command line is wrong, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import signal
import tempfile
from pathlib import Path

from outrider.deploy.bench.arguments import add_arguments as add_arguments
from outrider.deploy.bench.arguments import check, load_options
from outrider.deploy.cli.arguments import check_can_write, exit_status
from outrider.deploy.progress import Progress


def run(args: argparse.Namespace) -> int:
    """Measures and reports. Returns the exit status."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return exit_status("bench", lambda: measure(args, Progress()), verbose=args.verbose)


def measure(args: argparse.Namespace, progress: Progress) -> None:
    """Prints the table, and writes the document for ``--json``. Raises ConfigError, BenchError."""
    check(args)
    if args.json is not None:
        check_can_write("--json", args.json)
    # Imported here: vLLM takes seconds, and help needs none of it.
    from outrider.deploy.bench.load import Load
    from outrider.deploy.bench.report import table
    from outrider.deploy.bench.run import Run

    with tempfile.TemporaryDirectory(prefix="outrider-bench-") as scratch:
        run = Run(args, Load(load_options(args)), Path(scratch), progress)
        try:
            report = run.measure()
        finally:
            run.close()
    print(table(report), flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n")
        progress.say(f"wrote {args.json}")
