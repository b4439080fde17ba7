"""Implements ``outrider serve``: a deployment on this machine, from its configuration to a clean end.

stdout gets exactly one line, once requests can be answered. stderr gets progress, or one line that explains a
failure. However it ends, it leaves no process that it started, and none of their shared memory.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TextIO

import yaml

from outrider.cluster.config import ConfigError, OutriderConfig
from outrider.deploy.cli import fail
from outrider.deploy.cli.arguments import DTYPES, add_config_arguments
from outrider.deploy.liveness import ServerDied
from outrider.deploy.llm.flags import add_own_flags, config_from_flags, given_own_flags
from outrider.deploy.ports import reachable, settle_ports
from outrider.deploy.preset import Overrides, is_preset, preset_names, resolve_config
from outrider.deploy.processes import Stopped, StopSignal
from outrider.deploy.progress import Progress

DASHBOARD_LIMIT_S = 180

TAKES_FLAGS_OF_VLLM = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser, or_model=True)
    add_own_flags(parser)
    parser.add_argument("--print-config", action="store_true", help="print the configuration as YAML, and end")
    parser.add_argument("--dtype", choices=DTYPES, help="of target and draft model")
    parser.add_argument("--grpc-port", type=int, metavar="N", help="public gRPC port; 0 picks a free one")
    parser.add_argument("--http-port", "--port", type=int, metavar="N", help="public HTTP port; 0 picks a free one")
    parser.add_argument("--verbose", action="store_true", help="show the logs of Ray and vLLM, and stack traces")


def run(args: argparse.Namespace) -> int:
    """Serves until SIGINT or SIGTERM, or until Ray, Serve or the application ends. Returns the exit code, 1 after a
    failure."""
    if args.print_config:
        try:
            print(as_yaml(resolve(args)), end="")
        except ConfigError as error:
            return fail(str(error), verbose=args.verbose)
        return 0
    addresses = _claim_stdout(args.verbose)
    progress = Progress()
    stop = StopSignal()
    stop.install()
    code = 0
    server = None
    try:
        config = prepare(args, progress)
        # Ray reads this limit when it is imported; its dashboard takes longer than the default on a busy machine.
        os.environ.setdefault("RAY_DASHBOARD_STARTUP_TIMEOUT_S", str(DASHBOARD_LIMIT_S))
        # Imported here: Ray takes seconds, and most mistakes are found before it is needed.
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
    """Returns the checked configuration with settled ports. Fetches missing models of a small preset.

    Raises ConfigError naming the field.
    """
    from outrider.deploy.models.check import check_models
    from outrider.deploy.models.fetch import fetch
    from outrider.deploy.models.store import FETCHED_WHEN_MISSING, MODELS, PRESET_MODELS

    settled = settle_ports(resolve(args))  # before a fetch of minutes
    if (preset := args.config_file or args.config) in FETCHED_WHEN_MISSING and is_preset(preset):
        for name in PRESET_MODELS[preset]:
            fetch(MODELS[name], progress)
        settled = settle_ports(resolve(args))
    check_models(settled)
    return settled


def resolve(args: argparse.Namespace) -> OutriderConfig:
    """Returns the configuration of a preset, of a YAML file, or of a MODEL with vLLM's flags. Raises ConfigError."""
    if any(word.partition("=")[0] == "--model" for word in args.flags):
        raise ConfigError("--model: write MODEL without a flag, before the flags")
    config, model = args.config_file or args.config, args.config
    if args.config_file is not None and model is not None:
        raise ConfigError(f"--config: is given beside {model!r}; leave one of the two out")
    if config is None:
        args.usage_error(f"name a MODEL, a YAML file or a preset ({', '.join(preset_names())})")
    if args.config_file is not None or is_preset(config) or Path(config).is_file():
        if ignored := [*args.flags, *given_own_flags(args)]:
            raise ConfigError(f"{ignored[0]}: belongs to a MODEL; write it into the configuration file instead")
        return resolve_config(config, Overrides(args.target, args.drafter, args.dtype, args.grpc_port, args.http_port))
    if "/" not in config and not Path(config).is_dir():
        raise ConfigError(
            f"config: {config!r} is neither a preset ({', '.join(preset_names())}) nor a file, a checkpoint "
            "directory or a hub id (ORGANIZATION/NAME)"
        )
    if args.target is not None:
        raise ConfigError("--target: belongs to a preset or a file; the model is the target already")
    return config_from_flags(config, args, args.flags)


def as_yaml(config: OutriderConfig) -> str:
    """Returns the YAML of what is set in a configuration, but for ``serving.api_key``, which is a secret."""
    return yaml.safe_dump(config.model_dump(mode="json", exclude_unset=True), sort_keys=False)


def _claim_stdout(verbose: bool) -> TextIO:
    """Returns the real stdout, for the one line, and redirects all other output to stderr if verbose, else nowhere."""
    sys.stdout.flush()
    private = os.fdopen(os.dup(1), "w")
    if verbose:
        os.dup2(2, 1)
    else:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
    return private
