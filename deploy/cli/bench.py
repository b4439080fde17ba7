"""``outrider bench``: a closed-loop load on our server, in turns with another way to serve the same target.

Exit status: 0 measured, 1 it failed (one line on stderr says why), 2 the command line is wrong, 130 interrupted.
However it ends, no process it started is left, and no shared memory that is certainly theirs.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from outrider.cluster.config import ConfigError
from outrider.deploy.bench.arguments import add_arguments, check_comparison, load_of
from outrider.deploy.bench.load import read_dataset
from outrider.deploy.bench.machine import BenchError
from outrider.deploy.bench.plot import check_plot, draw
from outrider.deploy.bench.report import table
from outrider.deploy.bench.run import BenchRun, configuration, other_configuration
from outrider.deploy.cli import fail
from outrider.deploy.cli.models import check_can_write
from outrider.deploy.client.sync_client import OutriderError
from outrider.deploy.processes import SharedMemoryWatch, Stopped, StopSignal, adopt_orphans, end_descendants
from outrider.deploy.progress import Progress

__all__ = ["add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    """Measure and report. Returns the exit status."""
    progress, stop, memory = Progress(), StopSignal(), SharedMemoryWatch()
    stop.install()
    adopt_orphans()
    code = 0
    bench = None
    with tempfile.TemporaryDirectory(prefix="outrider-bench-") as scratch:
        try:
            bench = prepare(args, Path(scratch), progress, stop, memory)
            report = bench.measure()
            stop.hold()
            print(table(report), flush=True)
            write(args, report, progress)
        except Stopped:
            progress.say("stopping")
            code = 130
        except (ConfigError, BenchError, OutriderError, OSError) as error:
            code = fail(str(error), verbose=args.verbose)
        except Exception as error:  # noqa: BLE001 - the operator gets one line, not a stack trace
            code = fail(f"bench: {type(error).__name__}: {error}", verbose=args.verbose)
        finally:
            stop.hold()
            memory.note()
            try:
                if bench is not None:
                    bench.close()
            finally:
                left = end_descendants(grace_s=0.0 if bench is None else 5.0)
                for name in memory.remove_theirs():
                    progress.say(f"left /dev/shm/{name}: it may be another program's")
    if left:
        return fail(f"bench: could not end {', '.join(left)}", verbose=False)
    return code


def prepare(
    args: argparse.Namespace, scratch: Path, progress: Progress, stop: StopSignal, memory: SharedMemoryWatch
) -> BenchRun:
    """Everything that can go wrong before anything starts. Raises ConfigError, BenchError."""
    dataset = read_dataset(args.dataset)
    if args.plot is not None:
        check_plot(args.plot)
    for option, path in (("--json", args.json), ("--plot", args.plot)):
        if path is not None:
            check_can_write(option, path)
    config = configuration(args, progress)
    check_comparison(args, config)
    if args.prompts is not None and args.prompts > len(dataset.prompts):
        progress.say(f"--prompts {args.prompts}: the dataset has {len(dataset.prompts)}; all are used")
    other = other_configuration(args, progress)
    return BenchRun(args, load_of(args), dataset, config, other, scratch, progress, stop, memory)


def write(args: argparse.Namespace, report: dict[str, object], progress: Progress) -> None:
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n")
        progress.say(f"wrote {args.json}")
    if args.plot is not None:
        draw(report, args.plot)
        progress.say(f"wrote {args.plot}")
