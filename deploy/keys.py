"""API keys: a YAML list of their names and hashes, which the gateway asks for.

    - name: ci
      hash: sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
      expires: 2027-01-01T00:00:00+00:00
      requests_per_minute: 600

A secret has 256 random bits, so its plain SHA-256 does not help to find it.
"""

from __future__ import annotations

import hashlib
import secrets
import stat
from contextlib import suppress
from datetime import UTC, date, datetime, time
from pathlib import Path
from typing import Any

import yaml
from pydantic import AwareDatetime, Field, ValidationError, field_validator

from outrider.cluster.config_section import ConfigError, Section, read_yaml

PREFIX = "outrider_"
"""Of secrets that are made here, by which scanners of code and logs can know one."""

_PROBLEMS = {
    "name": "is missing or no name; write 1 to 64 letters, digits, '_', '.' and '-', a letter or digit first",
    "hash": "is missing or no hash; write 'sha256:' and 64 hexadecimal digits, as 'outrider keys new' does",
    "expires": "is no time with its zone; write it like 2027-01-01T00:00:00Z, or leave it out",
    "requests_per_minute": "is no whole number from 1 up; write one, or leave it out",
}


class Key(Section):
    """One entry of the file."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")
    hash: str = Field(pattern=r"^sha256:[0-9a-f]{64}$")
    expires: AwareDatetime | None = None
    """None: never."""

    requests_per_minute: int | None = Field(None, ge=1, le=1_000_000)
    """None: ``serving.gateway.requests_per_minute``."""

    @field_validator("expires", mode="before")
    @classmethod
    def _midnight(cls, value: Any) -> Any:
        """A date alone, quoted or not, is its first moment, UTC."""
        if isinstance(value, str):
            with suppress(ValueError):
                value = date.fromisoformat(value)
        if isinstance(value, date) and not isinstance(value, datetime):
            return datetime.combine(value, time(), UTC)
        return value


def hash_of(secret: str) -> str:
    return f"sha256:{hashlib.sha256(secret.encode()).hexdigest()}"


def new_secret() -> str:
    return PREFIX + secrets.token_urlsafe(32)


def read_private_file(field: str, path: Path) -> bytes:
    """Read a file that others may neither read nor change. Raises ConfigError."""
    try:
        mode = path.stat().st_mode
        if mode & (stat.S_IWGRP | stat.S_IRWXO):
            raise ConfigError(f"{field}: {path} may be read or changed by others; run: chmod 600 {path}")
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{field}: {path} cannot be read ({error.strerror}); name a file that can") from None


def load_keys(field: str, path: Path) -> list[Key]:
    """Raises ConfigError, which never holds what was found in the file: it may be a secret put there by mistake."""
    try:
        entries = read_yaml(read_private_file(field, path).decode())
    except (yaml.YAMLError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{field}: {path} is no valid YAML; write it with: outrider keys new NAME") from None
    if not isinstance(entries, list | None):
        raise ConfigError(f"{field}: {path} is no list of keys; begin each with '- name:'")
    keys = [_parse(f"{field}: {path}: entry {number}", entry) for number, entry in enumerate(entries or [], 1)]
    for what in ("name", "hash"):
        values = [getattr(key, what) for key in keys]
        if len(set(values)) < len(values):
            second = next(number for number, value in enumerate(values) if value in values[:number])
            raise ConfigError(f"{field}: {path}: entry {second + 1}: {what}: stands twice; remove one of the two")
    return keys


def _parse(where: str, entry: Any) -> Key:
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: is no mapping; begin it with '- name:'")
    if unknown := [str(field) for field in entry if field not in Key.model_fields]:
        known = ", ".join(Key.model_fields)
        raise ConfigError(f"{where}: {unknown[0][:64]}: is no field of a key; remove it (fields are {known})")
    try:
        return Key.model_validate(entry)
    except ValidationError as error:
        field = str(error.errors()[0]["loc"][0])
        raise ConfigError(f"{where}: {field}: {_PROBLEMS[field]}") from None


def as_yaml(keys: list[Key]) -> str:
    text: str = yaml.safe_dump(
        [key.model_dump(exclude_none=True) for key in keys], sort_keys=False, default_flow_style=False, width=120
    )
    return text
