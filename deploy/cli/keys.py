"""``outrider keys new|list|revoke``: the file of API keys that ``serving.keys_file`` names.

A running server takes a change within a second or so; nothing has to be started again. ``new`` prints the secret on
stdout, once: the file has its hash only.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from fcntl import LOCK_EX, flock
from pathlib import Path

from outrider.actors.serving.access.files import read_file
from outrider.actors.serving.access.keys import MOST_KEYS, SCOPES, Key, as_entry, hash_of, new_secret, parse_keys
from outrider.cluster.config_section import ConfigError
from outrider.deploy.argument_types import positive
from outrider.deploy.cli import fail

FILE_VARIABLE = "OUTRIDER_KEYS_FILE"
_DURATION = re.compile(r"([1-9][0-9]{0,4})([hdwy])")
_HOURS = {"h": 1, "d": 24, "w": 7 * 24, "y": 365 * 24}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_ENTRY = re.compile(r"^- ", re.MULTILINE)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="keys_command", metavar="new|list|revoke", required=True)
    new = commands.add_parser("new", help="make a key, print its secret once, and put its hash into the file")
    new.add_argument("name", metavar="NAME", type=_name, help="by which logs and metrics call it")
    new.add_argument("--scopes", metavar="SCOPE,SCOPE", type=_scopes, default=("generate",),
                     help=f"of {', '.join(SCOPES)} (default: generate)")  # fmt: skip
    new.add_argument("--expires", metavar="WHEN", type=_expires,
                     help="90d, 12h, 4w, 1y from now, or a time such as 2027-01-01 (default: never)")  # fmt: skip
    for limit in ("requests-per-minute", "concurrent-requests", "tokens-per-minute"):
        new.add_argument(f"--{limit}", metavar="N", type=positive, help="at most (default: any number)")
    new.add_argument("--no-learn", action="store_true", help="no drafter learns from the answers to this key")
    shown = commands.add_parser("list", help="what the file says of each key")
    revoke = commands.add_parser("revoke", help="take a key out of the file")
    revoke.add_argument("name", metavar="NAME")
    for command in (new, shown, revoke):
        command.add_argument("--file", metavar="FILE", type=Path, default=default_file(),
                             help=f"the file of keys (default: ${FILE_VARIABLE}, else %(default)s)")  # fmt: skip


def default_file() -> Path:
    """OUTRIDER_KEYS_FILE, else ``outrider/keys.yaml`` in the user's configuration directory."""
    if named := os.environ.get(FILE_VARIABLE):
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "outrider" / "keys.yaml"


def run(args: argparse.Namespace) -> int:
    """Returns the exit status."""
    commands: dict[str, Callable[[argparse.Namespace], None]] = {"new": _new, "list": _list, "revoke": _revoke}
    try:
        commands[args.keys_command](args)
    except ConfigError as error:
        return fail(str(error))
    except OSError as error:
        return fail(f"keys: {args.file}: {error.strerror}")
    return 0


def _new(args: argparse.Namespace) -> None:
    secret = new_secret()
    key = Key(
        name=args.name,
        hash=hash_of(secret.encode()),
        scopes=args.scopes,
        expires=args.expires,
        requests_per_minute=args.requests_per_minute,
        concurrent_requests=args.concurrent_requests,
        tokens_per_minute=args.tokens_per_minute,
        learn=not args.no_learn,
    )
    with _changing(args.file) as (text, write):
        keys = _parsed(args.file, text)
        if any(known.name == key.name for known in keys):
            raise ConfigError(
                f"NAME: {key.name!r} is in {args.file} already; choose another, or: outrider keys revoke {key.name}"
            )
        if len(keys) >= MOST_KEYS:
            raise ConfigError(f"NAME: {args.file} has {MOST_KEYS} keys already; revoke some")
        write(text + ("\n" if text and not text.endswith("\n") else "") + as_entry(key))
    print(secret, flush=True)
    until = f", until {key.expires:%Y-%m-%d %H:%M} UTC" if key.expires else ""
    print(
        f"outrider: key {key.name} ({', '.join(key.scopes)}{until}) is in {args.file}; its secret is shown this once",
        file=sys.stderr,
    )


def _list(args: argparse.Namespace) -> None:
    now = datetime.now(UTC)
    for key in _parsed(args.file, _text(args.file)):
        expires = "never expires" if key.expires is None else f"expires {key.expires:%Y-%m-%dT%H:%M:%SZ}"
        if key.is_expired(now):
            expires = f"EXPIRED {key.expires:%Y-%m-%dT%H:%M:%SZ}"
        limits = [
            f"{name.replace('_', ' ')} {value}"
            for name in ("requests_per_minute", "concurrent_requests", "tokens_per_minute")
            if (value := getattr(key, name)) is not None
        ]
        kept = [] if key.learn else ["not learned from"]
        print("  ".join([key.name, ",".join(key.scopes), expires, *limits, *kept]))


def _revoke(args: argparse.Namespace) -> None:
    with _changing(args.file) as (text, write):
        number = next((n for n, key in enumerate(_parsed(args.file, text)) if key.name == args.name), None)
        if number is None:
            raise ConfigError(f"NAME: {args.name!r} is not in {args.file}; see: outrider keys list")
        # By the text, which keeps comments and other entries as somebody wrote them.
        starts = [found.start() for found in _ENTRY.finditer(text)]
        ends = [*starts[1:], len(text)]
        left = text[: starts[number]] + text[ends[number] :] if number < len(starts) else ""
        if [key.name for key in _parsed(args.file, left)] != [
            key.name for key in _parsed(args.file, text) if key.name != args.name
        ]:
            raise ConfigError(
                f"{args.file}: not in the form that 'outrider keys new' writes; take the entry out by hand"
            )
        write(left)
    print(f"outrider: key {args.name} is revoked; what it has running goes on to its end", file=sys.stderr)


@contextmanager
def _changing(path: Path) -> Iterator[tuple[str, Callable[[str], None]]]:
    """The file's text, and how to replace it: whole or not at all, by one command at a time."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        flock(lock, LOCK_EX)

        def write(text: str) -> None:
            fresh = path.with_name(f".{path.name}.new")
            with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                if path.exists():  # the server may read it as another user, by the group
                    found = path.stat()
                    os.fchmod(file.fileno(), found.st_mode & 0o777)
                    if (found.st_uid, found.st_gid) != (os.getuid(), os.getgid()):
                        os.fchown(file.fileno(), found.st_uid, found.st_gid)
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(path)

        yield (_text(path) if path.exists() else ""), write
    finally:
        os.close(lock)


def _text(path: Path) -> str:
    try:
        return read_file("--file", path, private=True).decode()
    except UnicodeDecodeError:
        raise ConfigError(f"--file: {path} is no text; name a file of keys") from None


def _parsed(path: Path, text: str) -> list[Key]:
    try:
        return parse_keys(text)
    except ConfigError as error:
        raise ConfigError(f"--file: {path}: {error}") from None


def _name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no name: 1 to 64 letters, digits, '_', '.' and '-'")
    return text


def _scopes(text: str) -> tuple[str, ...]:
    scopes = tuple(part.strip() for part in text.split(","))
    if unknown := [scope for scope in scopes if scope not in SCOPES]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is no scope: {', '.join(SCOPES)}")
    return tuple(dict.fromkeys(scopes))


def _expires(text: str) -> datetime:
    now = datetime.now(UTC)
    if duration := _DURATION.fullmatch(text):
        return now.replace(microsecond=0) + timedelta(hours=int(duration[1]) * _HOURS[duration[2]])
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no time: 90d, 12h, 4w, 1y, or 2027-01-01") from None
    at = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
    if at <= now:
        raise argparse.ArgumentTypeError(f"{text!r} is past")
    return at
