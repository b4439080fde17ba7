"""Tracks the running requests of an ingress, which can be aborted and, when their replica is lost, sent again.

A request that is lost with its replica before it has any output is sent to another replica. A request that has output
ends with UNAVAILABLE.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from ray.serve.exceptions import BackPressureError

from outrider.actors.replica_calls import MayHaveDeadline, ReplicaLost, RequestIdInUse
from outrider.actors.serving.failures import REPLICA_LOST, Refused, cause_of

logger = logging.getLogger("ray.serve.outrider.ingress")

QUEUE_PATIENCE_S = 30.0
"""How long a request whose replica was lost waits for room in the queue."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0


class RunningRequest:
    """Runs one request from its arrival at the ingress to its end."""

    def __init__(self) -> None:
        self.aborted = False
        self._call: Any = None
        """The streaming call to a replica, as a DeploymentHandle makes it."""

    def abort(self) -> None:
        """Ends the request without an error: its stream of messages just ends."""
        self.aborted = True
        if self._call is not None:
            self._call.cancel()

    async def messages(
        self,
        send: Callable[[tuple[str, ...]], Any],
        deadline: MayHaveDeadline,
        *,
        max_retries: int,
        has_begun: Callable[[Any], bool] = lambda message: True,
    ) -> AsyncGenerator[Any, None]:
        """Yields the messages of ``send(replicas to avoid)``, sent again when its replica is lost before it has begun.

        has_begun: whether a message is part of the answer; earlier ones are held back until one is. However this ends
        early, the call is cancelled, which makes the engine abort the request. Raises what the call raises, and
        TimeoutError at the deadline.
        """
        avoid: tuple[str, ...] = ()
        retries, pause_s, give_up = 0, _FIRST_PAUSE_S, 0.0
        while not self.aborted:
            call = self._call = send(avoid)
            held: list[Any] = []
            begun = False
            try:
                stream = aiter(call)
                while True:
                    async with asyncio.timeout(deadline.seconds_left()):
                        message = await anext(stream, None)
                    if message is None:
                        break
                    held.append(message)
                    begun = begun or has_begun(message)
                    while begun and held:
                        yield held.pop(0)
                for message in held:
                    yield message
                return
            except BaseException as error:
                call.cancel()
                if self.aborted and not _is_cancelled():
                    return
                if begun or not isinstance(error, Exception):
                    raise
                lost = cause_of(error)
                if isinstance(lost, BackPressureError) and retries and time.monotonic() < give_up:
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                    continue
                if not isinstance(lost, REPLICA_LOST) or retries == max_retries:
                    raise
                retries, give_up = retries + 1, time.monotonic() + QUEUE_PATIENCE_S
                if isinstance(lost, ReplicaLost):
                    avoid = (*avoid, lost.replica_id)
                logger.warning("a request had no output yet when its replica was lost; sent again: %s", type(lost))


class RunningRequests:
    """Keeps the running requests of one process, by owner and id. Not thread-safe."""

    def __init__(self) -> None:
        self._requests: dict[tuple[int, str], RunningRequest] = {}
        self.draining = False
        """True: new requests are refused."""

    def __len__(self) -> int:
        return len(self._requests)

    @contextmanager
    def hold(self, owner: int, request_id: str) -> Iterator[RunningRequest]:
        """Registers a request while the context lasts.

        Raises RequestIdInUse for a second one of the same owner and id, and Refused while the server is taken down.
        """
        if self.draining:
            raise Refused(grpc.StatusCode.UNAVAILABLE, "the server is shutting down; retry")
        if (owner, request_id) in self._requests:
            raise RequestIdInUse(request_id)
        running = self._requests[owner, request_id] = RunningRequest()
        try:
            yield running
        finally:
            del self._requests[owner, request_id]

    def abort(self, owner: int, request_id: str) -> bool:
        """Aborts one request of the owner's. Returns whether it was here."""
        if (found := self._requests.get((owner, request_id))) is None:
            return False
        found.abort()
        return True


def _is_cancelled() -> bool:
    """Returns whether the running task itself is being cancelled, as opposed to the call that it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
