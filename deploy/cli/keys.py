"""Implements ``outrider keys new|revoke`` for the file of API keys, ``serving.gateway.keys_file``.

A running gateway applies a change within about a second. ``new`` prints the secret on stdout, once, since the file
has its hash only.
"""

from __future__ import annotations

import argparse
import os
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from outrider.cluster.config_section import ConfigError
from outrider.deploy.cli import fail
from outrider.deploy.cli.arguments import positive
from outrider.deploy.keys import Key, changing, hash_of, new_secret

FILE_VARIABLE = "OUTRIDER_KEYS_FILE"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="keys_command", metavar="new|revoke", required=True)
    whole: dict[str, Any] = {"allow_abbrev": False}
    new = commands.add_parser("new", help="make a key, print its secret once, and put its hash into the file", **whole)
    new.add_argument("name", metavar="NAME", help="of the key")
    new.add_argument("--expires", metavar="DAYS", type=positive, help="days from now (default: never)")
    limit = "at most (default: serving.gateway.requests_per_minute)"
    new.add_argument("--requests-per-minute", metavar="N", type=positive, help=limit)
    revoke = commands.add_parser("revoke", help="take a key out of the file", **whole)
    revoke.add_argument("name", metavar="NAME")
    configured = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config") / "outrider" / "keys.yaml"
    where = Path(os.environ.get(FILE_VARIABLE) or configured).expanduser()
    for command in (new, revoke):
        command.add_argument("--file", type=Path, default=where, help=f"${FILE_VARIABLE}, else %(default)s")


def run(args: argparse.Namespace) -> int:
    """Returns the exit status."""
    try:
        {"new": _new, "revoke": _revoke}[args.keys_command](args)
    except ValidationError as error:
        return fail(f"{error.errors()[0]['loc'][0]}: {error.errors()[0]['msg']}")
    except ConfigError as error:
        return fail(str(error))
    except OSError as error:
        return fail(f"keys: {args.file}: {error.strerror}")
    return 0


def _new(args: argparse.Namespace) -> None:
    secret, limit, now = new_secret(), args.requests_per_minute, datetime.now(UTC).replace(microsecond=0)
    expires = None if args.expires is None else now + timedelta(days=args.expires)
    key = Key(name=args.name, hash=hash_of(secret), expires=expires, requests_per_minute=limit)
    with changing(args.file) as keys:
        if any(known.name == key.name for known in keys):
            raise ConfigError(
                f"NAME: {key.name!r} is in {args.file} already; choose another, or: outrider keys revoke {key.name}"
            )
        keys.append(key)
    print(secret, flush=True)
    print(f"outrider: key {key.name} is in {args.file}; its secret is shown this once", file=sys.stderr)


def _revoke(args: argparse.Namespace) -> None:
    with changing(args.file) as keys:
        if not (revoked := [key for key in keys if key.name == args.name]):
            raise ConfigError(f"NAME: {args.name!r} is not in {args.file}")
        keys.remove(revoked[0])
    print(f"outrider: key {args.name} is revoked; its running requests are finished", file=sys.stderr)
