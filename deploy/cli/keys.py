"""``outrider keys new|list|revoke``: the file of API keys that ``serving.gateway.keys_file`` names.

A running gateway takes a change within about a second. ``new`` prints the secret on stdout, once: the file has its
hash only.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from fcntl import LOCK_EX, flock
from pathlib import Path

from pydantic import ValidationError

from outrider.cluster.config_section import ConfigError
from outrider.deploy.cli import fail
from outrider.deploy.cli.arguments import positive
from outrider.deploy.keys import Key, as_yaml, hash_of, load_keys, new_secret

FILE_VARIABLE = "OUTRIDER_KEYS_FILE"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="keys_command", metavar="new|list|revoke", required=True)
    new = commands.add_parser("new", help="make a key, print its secret once, and put its hash into the file")
    new.add_argument("name", metavar="NAME", help="to list and revoke it by")
    new.add_argument("--expires", type=_expires, help="90d from now, or a time such as 2027-01-01 (default: never)")
    limit = "at most (default: serving.gateway.requests_per_minute)"
    new.add_argument("--requests-per-minute", metavar="N", type=positive, help=limit)
    shown = commands.add_parser("list", help="what the file says of each key")
    revoke = commands.add_parser("revoke", help="take a key out of the file")
    revoke.add_argument("name", metavar="NAME")
    configured = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "outrider" / "keys.yaml"
    where = Path(os.environ.get(FILE_VARIABLE) or configured).expanduser()
    for command in (new, shown, revoke):
        command.add_argument("--file", type=Path, default=where, help=f"${FILE_VARIABLE}, else %(default)s")


def run(args: argparse.Namespace) -> int:
    """Returns the exit status."""
    try:
        {"new": _new, "list": _list, "revoke": _revoke}[args.keys_command](args)
    except ConfigError as error:
        return fail(str(error))
    except OSError as error:
        return fail(f"keys: {args.file}: {error.strerror}")
    return 0


def _new(args: argparse.Namespace) -> None:
    secret = new_secret()
    try:
        about = {"expires": args.expires, "requests_per_minute": args.requests_per_minute}
        key = Key(name=args.name, hash=hash_of(secret), **about)
    except ValidationError as error:
        raise ConfigError(f"{error.errors()[0]['loc'][0]}: {error.errors()[0]['msg']}") from None
    with _changing(args.file) as keys:
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
    with _changing(args.file) as keys:
        left = [key for key in keys if key.name != args.name]
        if len(left) == len(keys):
            raise ConfigError(f"NAME: {args.name!r} is not in {args.file}; see: outrider keys list")
        keys[:] = left
    print(f"outrider: key {args.name} is revoked; what it has running goes on to its end", file=sys.stderr)


@contextmanager
def _changing(path: Path) -> Iterator[list[Key]]:
    """Yields the file's keys, which are written back whole unless the body raises, by one command at a time."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with os.fdopen(os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)) as lock:
        flock(lock, LOCK_EX)
        found = path.stat() if path.exists() else None
        keys = load_keys("--file", path) if found else []
        yield keys
        fresh = path.with_name(f".{path.name}.new")
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            if found:  # the gateway may read it as another user, by the group
                os.fchmod(file.fileno(), found.st_mode & 0o777)
                os.fchown(file.fileno(), found.st_uid, found.st_gid)
            file.write(as_yaml(keys))
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)


def _expires(text: str) -> datetime:
    now = datetime.now(UTC).replace(microsecond=0)
    if days := re.fullmatch(r"([1-9][0-9]{0,4})d", text):
        return now + timedelta(days=int(days[1]))
    try:
        at = datetime.fromisoformat(text)
        at = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
    except ValueError:
        at = now
    if at <= now:
        raise argparse.ArgumentTypeError(f"{text!r} is no time to come: 90d, or 2027-01-01")
    return at
