"""Holds what commands share: types of arguments, groups of flags, and the exit status."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import grpc

from outrider.cluster.config import ConfigError
from outrider.deploy.cli import fail
from outrider.deploy.client.sync_client import API_KEY_VARIABLE
from outrider.deploy.preset import preset_names

DTYPES = ("auto", "float32", "bfloat16", "float16")


def address(text: str) -> str:
    """Parses HOST:PORT, with or without a scheme and a last slash. Returns ``http://HOST:PORT``, or ``https://…``."""
    scheme = "https://" if text.startswith("https://") else "http://"
    host, _, port = text.removeprefix(scheme).removesuffix("/").rpartition(":")
    if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    return f"{scheme}{host}:{port}"


def positive(text: str) -> int:
    """Parses an argument that is a whole number from 1 up."""
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1 up")
    return number


def add_config_arguments(parser: argparse.ArgumentParser, or_model: bool = False) -> None:
    """Adds which configuration, and what is put in place of its checkpoints. or_model: a MODEL may stand there."""
    named = f"a YAML file, or a preset: {', '.join(preset_names())}"
    if or_model:
        parser.set_defaults(usage_error=parser.error)
        parser.add_argument("config", metavar="MODEL", nargs="?", help=f"hub id or checkpoint directory; or {named}")
        parser.add_argument("--config", dest="config_file", metavar="FILE", help="the same as FILE in place of MODEL")
    else:
        parser.add_argument("config", metavar="CONFIG_OR_PRESET", help=named)
    parser.add_argument("--target", metavar="PATH", help="checkpoint directory (or hub id) in place of target.model")
    parser.add_argument("--drafter", metavar="PATH", help="likewise for drafter.model")


def add_device_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds device and type for commands that compute without a server."""
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1 (default: a GPU where there is one)")
    parser.add_argument("--dtype", default="auto", choices=DTYPES[:3], help="auto: bfloat16 where the device has it")
    parser.add_argument("--verbose", action="store_true", help="the whole traceback when it fails")


def add_connection_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds TLS. The API key is no flag, since all users of a machine can read command lines."""
    group = parser.add_argument_group(f"connection (a key is taken from ${API_KEY_VARIABLE})")
    group.add_argument("--tls", action="store_true", help="speak TLS; implied by https:// and by the next three")
    group.add_argument("--ca", metavar="FILE", type=Path, help="trust the authorities in it (PEM)")
    group.add_argument("--client-cert", metavar="FILE", type=Path, help="show this certificate (PEM)")
    group.add_argument("--client-key", metavar="FILE", type=Path, help="its private key (PEM)")


def credentials_of(args: argparse.Namespace) -> grpc.ChannelCredentials | None:
    """Returns credentials for TLS, or None for plain text. Raises ValueError naming the flag."""
    if (args.client_cert is None) != (args.client_key is None):
        raise ValueError("--client-cert and --client-key belong together; give both, or neither")
    if not (args.tls or args.ca or args.client_cert or args.address.startswith("https://")):
        return None
    found = []
    for flag, path in (("--ca", args.ca), ("--client-key", args.client_key), ("--client-cert", args.client_cert)):
        try:
            found.append(path and path.read_bytes())
        except OSError as error:
            raise ValueError(f"{flag}: cannot read {path}: {error.strerror}") from None
    return grpc.ssl_channel_credentials(*found)


def exit_status(command: str, work: Callable[[], None], *, interrupted: str = "interrupted", verbose: bool) -> int:
    """Runs a command's work and returns its exit status. An error is one line on stderr.

    Args:
        interrupted: That line for an interrupt.
    """
    try:
        work()
    except KeyboardInterrupt:
        return fail(f"{command}: {interrupted}", status=130)
    except (ConfigError, OSError) as error:
        return fail(f"{command}: {error}", verbose=verbose)
    except Exception as error:  # noqa: BLE001 - the operator gets one line, not a stack trace
        return fail(f"{command}: {type(error).__name__}: {error}", verbose=verbose)
    return 0


def check_can_write(option: str, path: Path) -> None:
    """Raises ConfigError unless a file can be written. It makes an empty one where there is none."""
    try:
        path.open("ab").close()
    except OSError as error:
        raise ConfigError(f"{option}: {path} cannot be written ({error.strerror}); write elsewhere") from None
