"""Which of an application's replicas no node has room for, by the placement groups that Serve makes and names."""

from __future__ import annotations

import functools

from ray.serve._private.common import ReplicaID
from ray.util import placement_group_table

from outrider.actors.serve_seam import leans_on

WITHOUT_A_PLACE = ("PENDING", "PREPARED", "RESCHEDULING")
"""States of Ray's. The last: a node of it went."""


def waiting_groups(app_name: str) -> list[tuple[str, str]]:
    """Deployment and replica of each. Raises what Ray raises; and ConfigError the first time where this Ray has other
    names."""
    _check()
    found = []
    for group in placement_group_table().values():
        if group["state"] in WITHOUT_A_PLACE and ReplicaID.is_full_id_str(group["name"]):
            replica = ReplicaID.from_full_id_str(group["name"])
            if replica.deployment_id.app_name == app_name:
                found.append((replica.deployment_id.name, replica.unique_id))
    return found


@functools.cache
def _check() -> None:
    leans_on.WAITING.check()
