"""API keys: a YAML list of their hashes and of what each may do, and whose secret a caller has shown.

    - name: ci
      hash: sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
      scopes: [generate, status]
      expires: 2027-01-01T00:00:00+00:00
      requests_per_minute: 600

Secrets are 256 random bits, so that a plain SHA-256 of one tells nothing about it. A secret is looked for by a value
that only this process can compute (an HMAC under a key of its own), and compared in constant time: how long a wrong one
takes says nothing about the right ones.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, date, datetime, time
from pathlib import Path
from typing import Any, Literal, get_args

import yaml
from pydantic import AwareDatetime, Field, ValidationError, field_validator

from outrider.actors.serving.access.files import read_file
from outrider.cluster.config_section import ConfigError, Section, StandsTwice, read_yaml

FIELD = "serving.keys_file"

Scope = Literal["generate", "status", "admin"]
SCOPES: tuple[Scope, ...] = get_args(Scope)

MOST_KEYS = 1000
"""In one file: each is a label in metrics."""

PREFIX = "outrider_"
"""Of secrets that are made here, by which scanners of code and logs can know one."""

_HASH = "sha256:"


class Key(Section):
    """One entry of the file."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")
    hash: str = Field(pattern=r"^sha256:[0-9a-f]{64}$")
    scopes: tuple[Scope, ...] = Field(min_length=1)
    expires: AwareDatetime | None = None
    """None: never."""

    requests_per_minute: int | None = Field(None, ge=1)
    concurrent_requests: int | None = Field(None, ge=1)
    tokens_per_minute: int | None = Field(None, ge=1)
    learn: bool = True
    """False: no drafter is trained on its answers, or keeps them to draft for others, whatever ``drafter`` says."""

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

    def is_expired(self, now: datetime) -> bool:
        return self.expires is not None and now >= self.expires


class KeyRing:
    """The keys of one version of the file."""

    def __init__(self, keys: Sequence[Key]) -> None:
        self.keys = tuple(keys)
        self._blinding = secrets.token_bytes(32)
        self._by_blinded = {self._blinded(key.hash): key for key in keys}

    def find(self, secret: bytes) -> Key | None:
        """Whose secret it is, expired or not."""
        shown = hash_of(secret)
        found = self._by_blinded.get(self._blinded(shown))
        return found if found is not None and hmac.compare_digest(found.hash, shown) else None

    def _blinded(self, key_hash: str) -> bytes:
        return hmac.digest(self._blinding, key_hash.encode(), "sha256")


def hash_of(secret: bytes) -> str:
    return _HASH + hashlib.sha256(secret).hexdigest()


def new_secret() -> str:
    return PREFIX + secrets.token_urlsafe(32)


def load_keys(path: str | Path) -> KeyRing:
    """Raises ConfigError naming field, file, entry and the fix."""
    data = read_file(FIELD, path, private=True)
    try:
        return KeyRing(parse_keys(data.decode()))
    except ConfigError as error:
        raise ConfigError(f"{FIELD}: {path}: {error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{FIELD}: {path}: is no text; write it with: outrider keys new NAME") from None


def parse_keys(text: str) -> list[Key]:
    """Raises ConfigError for what is no list of keys, and for a name or a secret that stands twice."""
    try:
        entries = read_yaml(text)
    except (yaml.YAMLError, ValueError) as error:
        where = getattr(error, "problem_mark", None)
        # What YAML says of the text around may be a hash, or a secret that was put there by mistake.
        at = f" at line {where.line + 1}" if where is not None else ""
        if isinstance(error, StandsTwice):
            raise ConfigError(f"has a key twice in one entry{at}; keep one of them") from None
        raise ConfigError(f"is no YAML{at}; write it with: outrider keys new NAME") from None
    if entries is None:
        return []
    if not isinstance(entries, list):
        raise ConfigError("is no list of keys; begin each with '- name:'")
    if len(entries) > MOST_KEYS:
        raise ConfigError(f"{len(entries)} keys are too many; keep {MOST_KEYS} at most")
    keys = [_parsed(number, entry) for number, entry in enumerate(entries, 1)]
    for what, values in (("name", [key.name for key in keys]), ("hash", [key.hash for key in keys])):
        seen: dict[str, int] = {}
        for number, value in enumerate(values, 1):
            if value in seen:
                shown = f" {value!r}" if what == "name" else ""
                raise ConfigError(f"entries {seen[value]} and {number} have the same {what}{shown}; remove one of them")
            seen[value] = number
    return keys


def _parsed(number: int, entry: Any) -> Key:
    if not isinstance(entry, dict):
        raise ConfigError(f"entry {number} is no mapping; begin it with '- name:'")
    try:
        return Key.model_validate(entry)
    except ValidationError as error:
        first = error.errors()[0]
        # Never what was found: somebody may have put the secret itself there.
        key = ".".join(str(part) for part in first["loc"][:1]) or "entry"
        name = entry.get("name")
        of = f" ({name})" if isinstance(name, str) and key != "name" and len(name) <= 64 else ""
        raise ConfigError(f"entry {number}{of}: {key}: {_PROBLEMS.get(key, first['msg'])}") from None


_PROBLEMS = {
    "name": "is missing or no name; send 1 to 64 letters, digits, '_', '.' and '-', a letter or digit first",
    "hash": "is missing or no hash; write 'sha256:' and 64 hexadecimal digits, as 'outrider keys new' does",
    "scopes": f"is missing or unknown; list one or more of {', '.join(SCOPES)}",
    "expires": "is no time with its zone; write it like 2027-01-01T00:00:00Z, or leave it out",
}


def as_entry(key: Key) -> str:
    """Of the file, as text that can be put at its end."""
    fields: dict[str, Any] = {"name": key.name, "hash": key.hash, "scopes": list(key.scopes)}
    if key.expires is not None:
        fields["expires"] = key.expires.astimezone(UTC).replace(microsecond=0)
    for limit in ("requests_per_minute", "concurrent_requests", "tokens_per_minute"):
        if (value := getattr(key, limit)) is not None:
            fields[limit] = value
    if not key.learn:
        fields["learn"] = False
    text: str = yaml.safe_dump([fields], sort_keys=False, default_flow_style=None, width=120)
    return text
