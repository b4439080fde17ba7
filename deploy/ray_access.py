"""Who may talk to Ray: its token, and TLS between its processes. Checked where a server starts; no Ray here.

Whoever may talk to one of Ray's ports runs code: GCS, raylets and workers take tasks, and Serve's replicas unpickle
what their callers send. Ray listens on every interface of its node. See docs/security.md.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from outrider.cluster.config import ConfigError

AUTH_MODE, TOKEN_PATH, TOKEN = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_TOKEN"
USE_TLS = "RAY_USE_TLS"
TLS_FILES = ("RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT")
_KEY = TLS_FILES[1]

OTHERS = stat.S_IRWXG | stat.S_IRWXO


def check(environment: Mapping[str, str]) -> None:
    """Before Ray starts. Raises ConfigError, naming the variable, for what Ray would ignore, or fail at later."""
    mode = environment.get(AUTH_MODE)
    if mode is not None and mode.lower() not in ("token", "disabled"):
        raise ConfigError(f"{AUTH_MODE}: {mode!r} is neither token nor disabled; leave it out, or set token")
    if (path := environment.get(TOKEN_PATH)) and not os.access(path, os.R_OK):
        raise ConfigError(f"{TOKEN_PATH}: {path} cannot be read; name the file that holds Ray's token")
    if not uses_tls(environment):
        return
    for name in TLS_FILES:
        file = environment.get(name, "")
        if not file:
            raise ConfigError(f"{name}: {USE_TLS} is on and this is not set; name a PEM file on every node")
        if not os.access(file, os.R_OK):
            raise ConfigError(f"{name}: {file} cannot be read; name a PEM file on every node")
    if _open_to_others(Path(environment[_KEY])):
        raise ConfigError(f"{_KEY}: {environment[_KEY]} can be read by other users; chmod 600 it")


def warnings(environment: Mapping[str, str], address: str | None) -> Iterator[str]:
    """Once Ray is up, which sets AUTH_MODE where nobody has. address: of a cluster that was there before."""
    if environment.get(AUTH_MODE, "").lower() == "token":
        return
    where = f"the Ray cluster at {address}" if address else "this Ray cluster, which listens on every interface,"
    yield (
        f"{where} is used WITHOUT A TOKEN: whoever reaches one of its ports, or of Serve's replicas, runs code as this "
        f"user. Unset {AUTH_MODE} or set it to token, on every node, or let nobody reach these ports (docs/security.md)"
    )


def token_file(environment: Mapping[str, str]) -> Path | None:
    """Where Ray keeps the token; None: it is in the environment itself."""
    if environment.get(TOKEN):
        return None
    return Path(environment.get(TOKEN_PATH) or Path.home() / ".ray" / "auth_token")


def keep_token_private(environment: Mapping[str, str]) -> str | None:
    """Ray makes its token's file readable for everybody on the machine. Returns what was done about it, or None."""
    path = token_file(environment)
    if path is None or not path.exists() or not _open_to_others(path):
        return None
    try:
        path.chmod(0o600)
    except OSError as error:
        return f"WARNING: other users of this machine can read Ray's token in {path}: {error.strerror}; chmod 600 it"
    return f"Ray's token in {path} could be read by other users; now it cannot"


def uses_tls(environment: Mapping[str, str]) -> bool:
    return environment.get(USE_TLS, "0").lower() in ("1", "true")


def _open_to_others(path: Path) -> bool:
    return bool(path.stat().st_mode & OTHERS)
