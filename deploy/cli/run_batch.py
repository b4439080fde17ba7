"""``outrider run-batch MODEL -i in.jsonl -o out.jsonl``: answers a file of requests without a server.

Exit status: 0 all answered, 1 it failed or some requests were refused, 130 interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from outrider.cluster.config import ConfigError
from outrider.deploy.cli import serve
from outrider.deploy.cli.arguments import DTYPES, add_config_arguments, check_can_write, exit_status
from outrider.deploy.llm.flags import add_own_flags

TAKES_FLAGS_OF_VLLM = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser, or_model=True)
    add_own_flags(parser)
    parser.add_argument("-i", "--input-file", type=Path, required=True, metavar="IN", help="requests, one a line")
    parser.add_argument("-o", "--output-file", type=Path, required=True, metavar="OUT", help="answers, one a line")
    parser.add_argument("--dtype", choices=DTYPES, help="of target and draft model")
    parser.add_argument("--verbose", action="store_true", help="the whole traceback when it fails")


def run(args: argparse.Namespace) -> int:
    """Answers what the output does not hold yet. Returns the exit status."""
    failed: list[int] = []
    status = exit_status("run-batch", lambda: failed.append(_run(args)), verbose=args.verbose)
    return status or int(any(failed))


def _run(args: argparse.Namespace) -> int:
    from outrider.deploy.llm.batch import answered, read_requests, run_batch

    args.grpc_port = args.http_port = None
    config = serve.resolve(args)
    if config.serving.most_replicas > 1:
        raise ConfigError("--num-replicas: a batch runs on one replica; leave it out")
    requests = read_requests(args.input_file)
    check_can_write("-o", args.output_file)
    done = answered(args.output_file)
    left = [request for request in requests if request.custom_id not in done]
    if done:
        print(f"outrider: run-batch: {len(requests) - len(left)} of {len(requests)} are answered", file=sys.stderr)
    failed = asyncio.run(run_batch(config, left, args.output_file)) if left else 0
    print(f"{len(left)} answered, {failed} of them with an error, in {args.output_file}")
    return failed
