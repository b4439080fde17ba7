"""Reads two private states of Ray and Serve: a node that starts slowly, and a replica that is being stopped."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ray._private import services
from ray._private.worker import global_worker
from ray.serve._private.replica import ReplicaActor

RAY_NODE_TIMEOUT_S = 30.0
"""Limit in Ray, which then raises "The current node timed out during startup"."""


def is_stopping() -> bool:
    """Returns whether Serve is stopping the replica of this process.

    Serve has no public hook for it: it waits for running requests, and calls ``__del__`` only after them.
    """
    return any(
        actor._replica_impl._shutting_down
        for actor in global_worker.actors.values()
        if isinstance(actor, ReplicaActor) and hasattr(actor, "_replica_impl")
    )


@contextmanager
def wait_longer_for_node(limit_s: float, say: Callable[[str], None]) -> Iterator[None]:
    """Makes ray.init wait up to limit_s for its node, longer than Ray does by itself.

    say: called once with a message when it takes longer than Ray's own limit.
    """
    ask = services.get_node

    def ask_patiently(*args: Any, **kwargs: Any) -> Any:
        began, said = time.monotonic(), False
        while True:
            try:
                return ask(*args, **kwargs)
            except RuntimeError:  # not there yet
                waited_s = time.monotonic() - began
                if waited_s > limit_s:
                    raise
                if waited_s > RAY_NODE_TIMEOUT_S and not said:
                    said = True
                    late = f"Ray's node takes longer than {RAY_NODE_TIMEOUT_S:g} s to come up"
                    say(f"{late}; waiting {limit_s:g} s for it")
                time.sleep(0.1)

    services.get_node = ask_patiently
    try:
        yield
    finally:
        services.get_node = ask
