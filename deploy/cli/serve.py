"""``outrider serve``: a deployment on this machine, from configuration to clean end.

stdout gets exactly one line, once requests can be answered. stderr gets progress, or one line that explains a
failure. However it ends, no process it started is left, and no shared memory that is certainly theirs.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import TextIO

from outrider.cluster.config import ConfigError, OutriderConfig
from outrider.deploy.cli import fail
from outrider.deploy.cli.arguments import DTYPES, add_config_arguments
from outrider.deploy.liveness import ServerDied
from outrider.deploy.ports import reachable, settle_ports
from outrider.deploy.preset import Overrides, is_preset, models_to_fetch, resolve_config
from outrider.deploy.processes import Stopped, StopSignal
from outrider.deploy.progress import Progress

DASHBOARD_LIMIT_S = 180


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)
    parser.add_argument("--dtype", choices=DTYPES, help="of target and draft model")
    parser.add_argument("--grpc-port", type=int, metavar="N", help="public gRPC port; 0 picks a free one")
    parser.add_argument("--http-port", type=int, metavar="N", help="public HTTP port; 0 picks a free one")
    parser.add_argument("--verbose", action="store_true", help="show the logs of Ray and vLLM, and stack traces")


def run(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM, or until what it runs on dies. Returns the exit code: 0, or 1 after a failure told
    on stderr."""
    addresses = _claim_stdout(args.verbose)
    progress = Progress()
    stop = StopSignal()
    stop.install()
    code = 0
    server = None
    try:
        with progress.stage("configuration, ports and checkpoints checked"):
            config = prepare(args, progress)
        # Ray reads it when it is imported, and ends where its dashboard takes longer, as on a busy machine it does.
        os.environ.setdefault("RAY_DASHBOARD_STARTUP_TIMEOUT_S", str(DASHBOARD_LIMIT_S))
        # Imported here: Ray takes seconds, and most mistakes are found before it is needed.
        with progress.stage("Ray imported"):
            from outrider.deploy.server import Server

        server = Server(config, stop, progress, verbose=args.verbose)
        server.start()
        host, http_port, grpc_port = config.serving.public
        print(
            f"outrider: serving {config.served_model_name} grpc={reachable(host)}:{grpc_port} "
            f"http={reachable(host)}:{http_port}",
            file=addresses,
            flush=True,
        )
        server.wait()
    except Stopped:
        progress.say("stopping")
    except ConfigError as error:
        code = fail(str(error), verbose=args.verbose)
    except ServerDied as error:
        code = fail(f"serve: {error}", verbose=args.verbose)
    except Exception as error:  # noqa: BLE001 - the operator gets one line, not a stack trace
        code = fail(f"serve: {type(error).__name__}: {error}", verbose=args.verbose)
    finally:
        stop.hold()
        left = server.stop() if server is not None else []
    if left:
        print(f"outrider: serve: could not end {', '.join(left)}", file=sys.stderr, flush=True)
        code = 1
    elif server is not None and code == 0:
        progress.say("stopped; nothing of this server is left")
    return code


def prepare(args: argparse.Namespace, progress: Progress) -> OutriderConfig:
    """Everything that can go wrong without starting anything. Fetches the models of a small preset when missing.

    Raises ConfigError, by field.
    """
    from outrider.deploy.models.check import check_models
    from outrider.deploy.models.fetch import fetch
    from outrider.deploy.models.store import FETCHED_WHEN_MISSING, MODELS, models_dir

    overrides = Overrides(args.target, args.drafter, args.dtype, args.grpc_port, args.http_port)
    settle_ports(resolve_config(args.config, overrides))  # before a fetch of minutes
    if is_preset(args.config) and args.config in FETCHED_WHEN_MISSING:
        for name in models_to_fetch(args.config, overrides):
            fetch(MODELS[name], models_dir(), progress)
    config = settle_ports(resolve_config(args.config, overrides))
    check_models(config)
    return config


def _claim_stdout(verbose: bool) -> TextIO:
    """The real stdout, for the one line. What anything else prints there from now on is for ``--verbose``."""
    sys.stdout.flush()
    private = os.fdopen(os.dup(1), "w")
    if verbose:
        os.dup2(2, 1)
    else:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
    return private
