"""Implements ``outrider keys new|list|revoke`` for the file of API keys, ``serving.gateway.keys_file``.

A running gateway applies a change within about a second. ``new`` prints the secret on stdout, once, since the file
has its hash only.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from outrider.cluster.config_section import ConfigError
from outrider.deploy.cli import fail
from outrider.deploy.cli.arguments import positive
from outrider.deploy.keys import Key, changing, hash_of, load_keys, new_secret

FILE_VARIABLE = "OUTRIDER_KEYS_FILE"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="keys_command", metavar="new|list|revoke", required=True)
    whole: dict[str, Any] = {"allow_abbrev": False}
    new = commands.add_parser("new", help="make a key, print its secret once, and put its hash into the file", **whole)
    new.add_argument("name", metavar="NAME", help="of the key")
    new.add_argument("--expires", type=_expires, help="90d from now, or a time such as 2027-01-01 (default: never)")
    limit = "at most (default: serving.gateway.requests_per_minute)"
    new.add_argument("--requests-per-minute", metavar="N", type=positive, help=limit)
    shown = commands.add_parser("list", help="list the keys of the file", **whole)
    revoke = commands.add_parser("revoke", help="take a key out of the file", **whole)
    revoke.add_argument("name", metavar="NAME")
    configured = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config") / "outrider" / "keys.yaml"
    where = Path(os.environ.get(FILE_VARIABLE) or configured).expanduser()
    for command in (new, shown, revoke):
        command.add_argument("--file", type=Path, default=where, help=f"${FILE_VARIABLE}, else %(default)s")


def run(args: argparse.Namespace) -> int:
    """Returns the exit status."""
    try:
        {"new": _new, "list": _list, "revoke": _revoke}[args.keys_command](args)
    except ValidationError as error:
        return fail(f"{error.errors()[0]['loc'][0]}: {error.errors()[0]['msg']}")
    except ConfigError as error:
        return fail(str(error))
    except OSError as error:
        return fail(f"keys: {args.file}: {error.strerror}")
    return 0


def _new(args: argparse.Namespace) -> None:
    secret, limit = new_secret(), args.requests_per_minute
    key = Key(name=args.name, hash=hash_of(secret), expires=args.expires, requests_per_minute=limit)
    with changing(args.file) as keys:
        if any(known.name == key.name for known in keys):
            raise ConfigError(
                f"NAME: {key.name!r} is in {args.file} already; choose another, or: outrider keys revoke {key.name}"
            )
        keys.append(key)
    print(secret, flush=True)
    print(f"outrider: key {key.name} is in {args.file}; its secret is shown this once", file=sys.stderr)


def _list(args: argparse.Namespace) -> None:
    for key in load_keys("--file", args.file):
        expires = "never expires"
        if key.expires is not None:
            word = "EXPIRED" if key.expires <= datetime.now(UTC) else "expires"
            expires = f"{word} {key.expires.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"
        limit = [] if key.requests_per_minute is None else [f"requests per minute {key.requests_per_minute}"]
        print("  ".join([key.name, expires, *limit]))


def _revoke(args: argparse.Namespace) -> None:
    with changing(args.file) as keys:
        if not (revoked := [key for key in keys if key.name == args.name]):
            raise ConfigError(f"NAME: {args.name!r} is not in {args.file}; see: outrider keys list")
        keys.remove(revoked[0])
    print(f"outrider: key {args.name} is revoked; its running requests are finished", file=sys.stderr)


def _expires(text: str) -> datetime:
    now = datetime.now(UTC).replace(microsecond=0)
    try:
        days = re.fullmatch(r"([1-9][0-9]{0,4})d", text)
        at = now + timedelta(days=int(days[1])) if days else datetime.fromisoformat(text)
    except ValueError:
        at = now
    at = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
    if at <= now:
        raise argparse.ArgumentTypeError(f"{text!r} is no time to come: 90d, or 2027-01-01")
    return at
