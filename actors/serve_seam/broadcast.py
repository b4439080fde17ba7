"""One call to every replica of a deployment, for what a router cannot aim: abort by id, counters, caches.

Serve's own ``DeploymentHandle.broadcast`` loses every answer when one replica is late, and does not say whose answer
is whose. Here late replicas cost their own answer only, and each replica signs what it sends.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

logger = logging.getLogger("ray.serve.outrider.routing")

SIGNED_REPLY_METHOD = "signed_reply"
"""What a deployment must offer to be asked: ``signed_reply(method, args) -> ReplicaReply``; see ``sign``."""


@dataclass(frozen=True)
class ReplicaReply:
    """One replica's answer: value, or error when it failed or did not answer in time."""

    replica_id: str | None
    """Serve's unique id of the replica; None when it died or was late, and so never said who it is."""

    value: Any = None
    error: str | None = None

    @property
    def ok(self) -> bool:
        return self.error is None


async def broadcast(handle: DeploymentHandle, method: str, *args: Any, timeout_s: float) -> list[ReplicaReply]:
    """Call method(*args) on each replica that is running now; one reply each, those that answered first.

    The calls take part in max_ongoing_requests, so a deployment that should hear them under full load needs slots to
    spare. Raises DeploymentUnavailableError when no replica is running, ConnectionError when the replicas are not even
    known within timeout_s.
    """
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


async def sign(target: Any, replica_id: str, method: str, args: tuple[Any, ...]) -> ReplicaReply:
    """The replica's side: call the coroutine method of target, and put the replica's id on what comes of it."""
    try:
        return ReplicaReply(replica_id, value=await getattr(target, method)(*args))
    except Exception as error:
        logger.warning("%s failed on replica %s", method, replica_id, exc_info=error)
        return ReplicaReply(replica_id, error=f"{type(error).__name__}: {error}")


def _reply(answer: asyncio.Future[ReplicaReply], method: str, timeout_s: float) -> ReplicaReply:
    if not answer.done() or answer.cancelled():
        return ReplicaReply(None, error=f"no answer to {method} within {timeout_s:g} s")
    if (error := answer.exception()) is not None:
        return ReplicaReply(None, error=f"{type(error).__name__}: {error}")
    return answer.result()
