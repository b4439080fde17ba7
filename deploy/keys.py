"""Reads and writes API keys: a YAML list of their names and hashes, by which the gateway admits requests.

    - name: ci
      hash: sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
      expires: 2027-01-01T00:00:00+00:00
      requests_per_minute: 600

A secret has 256 random bits, so its plain SHA-256 does not help to find it.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from outrider.cluster.config_section import ConfigError, Section, read_yaml
from outrider.cluster.whole_files import whole_file


def _in_a_zone(value: datetime) -> datetime:
    return value if value.tzinfo is not None else value.replace(tzinfo=UTC)


class Key(Section):
    """Holds one entry of the file."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")
    hash: str = Field(pattern=r"^sha256:[0-9a-f]{64}$")
    expires: Annotated[datetime, AfterValidator(_in_a_zone)] | None = None
    """Default: never. A time without a zone is UTC."""

    requests_per_minute: int | None = Field(None, ge=1, le=1_000_000)
    """Default: ``serving.gateway.requests_per_minute``."""


_FILE = TypeAdapter(list[Key])


def hash_of(secret: str) -> str:
    """Returns the hash that the file keeps of a secret."""
    return f"sha256:{hashlib.sha256(secret.encode()).hexdigest()}"


def new_secret() -> str:
    """Returns a random secret. Secret scanners recognise it by its prefix."""
    return "outrider_" + secrets.token_urlsafe(32)


def read_private_file(field: str, path: Path) -> bytes:
    """Returns the content of a file that other users may neither read nor change. Raises ConfigError."""
    try:
        if path.stat().st_mode & (stat.S_IWGRP | stat.S_IRWXO):
            raise ConfigError(f"{field}: {path} may be read or changed by others; run: chmod 600 {path}")
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{field}: {path} cannot be read ({error.strerror}); name a file that can") from None


def load_keys(field: str, path: Path) -> list[Key]:
    """Returns the keys of a file. Raises ConfigError without the file's content, which may be a secret."""
    content = read_private_file(field, path)
    try:
        entries = read_yaml(content.decode())
    except (yaml.YAMLError, ValueError):
        raise ConfigError(f"{field}: {path} is no valid YAML; write it with: outrider keys new NAME") from None
    try:
        keys = _FILE.validate_python(entries or [])
    except ValidationError as error:
        wrong = error.errors(include_input=False, include_context=False)[0]
        raise ConfigError(f"{field}: {path}: {'.'.join(map(str, wrong['loc']))[:64]}: {wrong['msg']}") from None
    for what in ("name", "hash"):
        if len({getattr(key, what) for key in keys}) < len(keys):
            raise ConfigError(f"{field}: {path}: a {what} occurs twice; remove one of the two")
    return keys


@contextmanager
def changing(path: Path) -> Iterator[list[Key]]:
    """Yields the file's keys for the body to change, and writes them back unless it raises."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = path.stat() if path.exists() else None
    keys = load_keys("--file", path) if found else []
    yield keys
    with whole_file(path) as fresh:
        fresh.touch(mode=0o600)
        if found:  # the gateway may run as another user and read it by its group
            fresh.chmod(stat.S_IMODE(found.st_mode))
            os.chown(fresh, found.st_uid, found.st_gid)
        fresh.write_text(as_yaml(keys))


def as_yaml(keys: list[Key]) -> str:
    entries = [key.model_dump(exclude_none=True) for key in keys]
    return str(yaml.safe_dump(entries, sort_keys=False, default_flow_style=False, width=120))
