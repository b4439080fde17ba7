"""Checks that Ray is protected by its token. No Ray here.

A client of any of Ray's ports can run code: GCS, raylets and workers take tasks, and Serve's replicas unpickle what
their callers send. Ray listens on every interface of its node. See docs/operations.md.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

AUTH_MODE, TOKEN_PATH, TOKEN = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_TOKEN"

_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def secured(environment: Mapping[str, str], address: str | None) -> Iterator[str]:
    """Makes the token's file private, which Ray makes readable for everybody. Yields messages for the operator.

    Args:
        environment: After Ray's start, which sets AUTH_MODE by default.
        address: The cluster's, if it is not our own.
    """
    if environment.get(AUTH_MODE, "").lower() != "token":
        where = f"the Ray cluster at {address}" if address else "this Ray cluster, which listens on every interface,"
        yield (
            f"WARNING: {where} is used WITHOUT A TOKEN: any client of its ports, or of Serve's replicas, runs "
            f"code as this user. Unset {AUTH_MODE} or set it to token, on every node, or let nobody reach these ports "
            "(docs/operations.md)"
        )
    path = Path(environment.get(TOKEN_PATH) or Path.home() / ".ray" / "auth_token")
    if environment.get(TOKEN) or not path.exists() or not path.stat().st_mode & _OTHERS:
        return
    try:
        path.chmod(0o600)
        yield f"Ray's token in {path} could be read by other users; now it cannot"
    except OSError as error:
        yield f"WARNING: other users of this machine can read Ray's token in {path}: {error.strerror}; chmod 600 it"
