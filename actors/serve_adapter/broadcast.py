"""Calls every replica of a deployment: abort by id, metrics, health.

Serve's own ``DeploymentHandle.broadcast`` loses all replies when one replica is late, and does not say which reply is
from which replica. Here a late replica loses its own reply only, and each reply names its replica.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from outrider.actors.replica_calls import ReplicaReply

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

SIGNED_REPLY_METHOD = "signed_reply"
"""Method that the deployment must have: ``signed_reply(method, args) -> ReplicaReply``, see replica_calls.sign."""


async def broadcast(handle: DeploymentHandle, method: str, *args: Any, timeout_s: float) -> list[ReplicaReply]:
    """Calls method(*args) on each running replica, past the request queue. Returns one reply each, successes first.

    Raises DeploymentUnavailableError when no replica is running, and ConnectionError when the replicas are not known
    within timeout_s.
    """
    give_up = time.monotonic() + timeout_s
    response = handle.broadcast(SIGNED_REPLY_METHOD, method, args)
    try:
        # Not results_async(), which with a time limit returns all answers or none.
        async with asyncio.timeout(timeout_s):
            calls = await response._fetch_replica_results_async()
    except TimeoutError:
        raise ConnectionError(f"no replica could be asked for {method} within {timeout_s:g} s") from None
    waiting = [asyncio.ensure_future(call.get_async()) for call in calls]
    try:
        await asyncio.wait(waiting, timeout=max(0.0, give_up - time.monotonic()))
    finally:
        for call, answer in zip(calls, waiting, strict=True):
            if not answer.done():
                answer.cancel()
                call.cancel()
    replies = [_reply(answer, method, timeout_s) for answer in waiting]
    return sorted(replies, key=lambda reply: not reply.ok)


def _reply(answer: asyncio.Future[ReplicaReply], method: str, timeout_s: float) -> ReplicaReply:
    if not answer.done() or answer.cancelled():
        return ReplicaReply(None, error=f"no answer to {method} within {timeout_s:g} s", is_late=True)
    if (error := answer.exception()) is not None:
        return ReplicaReply(None, error=f"{type(error).__name__}: {error}")
    return answer.result()
