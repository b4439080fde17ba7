"""Chooses the target replica of each request, by the public hooks of Serve's RequestRouter.

Serve makes one in every process that holds a handle of the Target deployment. The policy is in
outrider.actors.serving.routing.policy.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RequestRouter, RunningReplica

from outrider.actors.serving.routing.policy import RoutingPolicy, RoutingSettings
from outrider.actors.serving.routing.request_profile import RoutedRequest

SENT_WITHIN_S = 60.0
"""After this time a request with a reserved place that was not sent has lost its caller."""

_MOST_TASKS = 1 << 20
_RESERVED = "outrider_reserved_replica"
"""Attribute of a pending request: the replica that holds a place for it until it is sent."""


class TargetRouter(RequestRouter):
    """Ranks replicas for Serve by RoutingPolicy, and reserves a place for each generation until it is sent.

    All methods run on one event loop. A call's first argument says what it is: ``routed``, a RoutedRequest, and
    ``avoid_replicas``. A call without them generates nothing, and is sent to a full replica too. Generations get places
    in order of arrival.
    """

    def initialize_state(self, **settings: Any) -> None:
        """Makes the policy. settings: the fields of RoutingSettings, from request_router_kwargs."""
        self._policy = RoutingPolicy(RoutingSettings(**settings))
        self._queue = asyncio.Lock()
        """Held by the generation that waits for the next place; the others wait for the lock, which is fair."""

        self._may_have_room = asyncio.Event()

    @property
    def max_num_routing_tasks(self) -> int:
        """Allows one task for each request.

        A waiting generation keeps its task, and no control call may wait behind it. The tasks do not poll, and the
        deployment's max_queued_requests bounds their number.
        """
        return _MOST_TASKS if self.curr_replicas else 0

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._policy.update({replica.replica_id.unique_id: replica.routing_stats for replica in replicas})
        self._may_have_room.set()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._policy.forget(replica_id.unique_id)

    def on_replica_actor_unavailable(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_unavailable(replica_id)
        self._policy.suspect(replica_id.unique_id)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Returns one rank per replica, best first: Serve takes the next one only if the best turns out to be full."""
        if pending_request is None:
            return [[replica] for replica in candidate_replicas]
        pending_request.routing_context.should_backoff = True  # all replicas have been asked before the next try
        call = pending_request.args[0] if pending_request.args else None
        avoid = frozenset(getattr(call, "avoid_replicas", ()))
        routed = getattr(call, "routed", None)
        if routed is None:
            return self._ranks(self._policy.rank(RoutedRequest(), self._names(), avoid, even_full=True))
        self._release(pending_request)
        async with self._queue:
            while not (ranked := self._policy.rank(routed, self._names(), avoid)):
                self._may_have_room.clear()
                await self._may_have_room.wait()
            # Before it is sent, so that requests of one burst see each other.
            self._reserve(pending_request, routed, ranked[0])
        return self._ranks(ranked)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        reserved = getattr(pending_request, _RESERVED, None)
        if reserved not in (None, replica_id.unique_id):  # Serve took another one of the ranking
            self._release(pending_request)
            self._reserve(pending_request, pending_request.args[0].routed, replica_id.unique_id)
        setattr(pending_request, _RESERVED, None)  # from now on on_request_completed ends it

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._policy.release(replica_id.unique_id, internal_request_id)
        self._may_have_room.set()

    def _names(self) -> list[str]:
        return [replica_id.unique_id for replica_id in self.curr_replicas]

    def _ranks(self, names: list[str]) -> list[list[RunningReplica]]:
        replicas = {replica_id.unique_id: replica for replica_id, replica in self.curr_replicas.items()}
        return [[replicas[name]] for name in names]

    def _reserve(self, pending_request: PendingRequest, routed: RoutedRequest, replica: str) -> None:
        self._policy.assign(routed, replica, pending_request.metadata.internal_request_id)
        setattr(pending_request, _RESERVED, replica)
        pending_request.future.add_done_callback(partial(self._on_chosen, pending_request))

    def _on_chosen(self, pending_request: PendingRequest, future: asyncio.Future[RunningReplica]) -> None:
        """Gives the place back if the caller leaves before its request is sent: Serve has no hook for that."""
        if future.cancelled():
            self._release(pending_request)
        elif getattr(pending_request, _RESERVED, None) is not None:
            asyncio.get_running_loop().call_later(SENT_WITHIN_S, self._release_unsent, pending_request, future)

    def _release_unsent(self, pending_request: PendingRequest, future: asyncio.Future[RunningReplica]) -> None:
        if pending_request.future is future:  # else it was routed once more
            self._release(pending_request)

    def _release(self, pending_request: PendingRequest) -> None:
        if (replica := getattr(pending_request, _RESERVED, None)) is not None:
            setattr(pending_request, _RESERVED, None)
            self._policy.release(replica, pending_request.metadata.internal_request_id)
            self._may_have_room.set()
