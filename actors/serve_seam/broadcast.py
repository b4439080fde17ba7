"""One call to every replica of a deployment, for what a router cannot aim: abort by id, counters, caches.

Serve's own ``DeploymentHandle.broadcast`` loses every answer when one replica is late, and does not say whose answer
is whose. Here late replicas cost their own answer only, and each replica signs what it sends.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from outrider.actors.replica_calls import ReplicaReply

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

SIGNED_REPLY_METHOD = "signed_reply"
"""What a deployment must offer to be asked: ``signed_reply(method, args) -> ReplicaReply``; see replica_calls.sign."""


async def broadcast(
    handle: DeploymentHandle, method: str, *args: Any, timeout_s: float, beside: str | None = None
) -> list[ReplicaReply]:
    """Call method(*args) on each replica that is running now; one reply each, those that answered first. beside: the id
    of one whose answer is known: where it is the only one, nobody is asked.

    The calls take part in max_ongoing_requests, so a deployment that should hear them under full load needs slots to
    spare. Raises DeploymentUnavailableError when no replica is running, ConnectionError when the replicas are not even
    known within timeout_s.
    """
    if beside is not None and is_alone(handle, beside):
        return []
    give_up = time.monotonic() + timeout_s
    response = handle.broadcast(SIGNED_REPLY_METHOD, method, args)
    try:
        # Not results_async(): with a time limit that is all of the answers or none.
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


def is_alone(handle: DeploymentHandle, replica_id: str) -> bool:
    """Whether that replica is the only one that runs, as the handle's router has it from Serve. False until the handle
    has been used."""
    if handle._router is None or (router := handle._router._asyncio_router.request_router) is None:
        return False
    return [running.unique_id for running in router.curr_replicas] == [replica_id]


def _reply(answer: asyncio.Future[ReplicaReply], method: str, timeout_s: float) -> ReplicaReply:
    if not answer.done() or answer.cancelled():
        return ReplicaReply(None, error=f"no answer to {method} within {timeout_s:g} s")
    if (error := answer.exception()) is not None:
        return ReplicaReply(None, error=f"{type(error).__name__}: {error}")
    return answer.result()
