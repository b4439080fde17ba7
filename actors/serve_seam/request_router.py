"""Serve's request router for target replicas: which one gets a request, and whose request is next. It adapts the policy
and the turns to Serve, and has no policy of its own.

One lives in every process that holds a handle of the Target deployment: in each ingress replica, and in other
applications that call it. Each knows what it routed itself; of the others it knows what the replicas report.
"""

from __future__ import annotations

import logging
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RequestRouter, RunningReplica

from outrider.actors.serve_seam import leans_on, running_replicas
from outrider.actors.serve_seam.steady_time import go_by_steady_time
from outrider.actors.serving.routing.policy import RoutingPolicy, RoutingSettings
from outrider.actors.serving.routing.request_profile import RoutedRequest, profile
from outrider.actors.serving.routing.turns import Turns

logger = logging.getLogger("ray.serve.outrider.routing")

_CHARGED = "outrider_charged_replica"
"""On a pending request: the replica that it counts for."""

_PROFILE = "outrider_profile"
"""On a pending request: what the policy knows of it."""

_GAVE_WAY = "outrider_gave_way"
"""On a pending request: to whom, with the last place that was found for it."""


class TargetRouter(RequestRouter):
    """Serve makes it, calls initialize_state, then the rest, all on one event loop."""

    def initialize_state(self, **settings: Any) -> None:
        """settings: RoutingSettings' fields, as request_router_kwargs has them."""
        leans_on.CALLER.check()  # broadcasts go from the same processes
        go_by_steady_time()
        self._policy = RoutingPolicy(RoutingSettings(**settings))
        self._turns = Turns()
        """Of the generations that wait; what is not in it, control calls and those that had their turn, goes first."""

        self._tried: dict[int, PendingRequest] = {}
        """By id(): what Serve's routing tasks, two a replica, look for a place for."""

        self._warned = False

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        running_replicas.note(self._deployment_id.app_name, self._deployment_id.name, len(replicas))
        self._policy.update({replica.replica_id.unique_id: replica.routing_stats for replica in replicas})

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._policy.forget(replica_id.unique_id)

    def on_replica_actor_unavailable(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_unavailable(replica_id)
        self._policy.suspect(replica_id.unique_id)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """One rank per replica, best first, so that Serve takes the next only if one turns out to be full."""
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if pending_request is None:
            return [[replica] for replica in replicas.values()]
        # Wait a little before the next try: every replica has been asked in this one.
        pending_request.routing_context.should_backoff = True
        request = self._profile(pending_request)
        self._release(pending_request)
        if request is None:  # a control call: cheap, and to be heard by a full replica too
            ranked = self._policy.rank(RoutedRequest(), list(replicas), even_full=True)
        else:
            ranked = self._policy.rank(request, list(replicas))
            if ranked and self._gives_way(pending_request, list(replicas)):
                return []
            if ranked:
                # Before it is sent: requests that come in one burst must see each other.
                self._assign(pending_request, request, ranked[0])
                self._turns.serve(id(pending_request))
        return [[replicas[name]] for name in ranked]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        chosen = getattr(pending_request, _CHARGED, None)
        if chosen is not None and chosen != replica_id.unique_id:  # Serve found that one full
            self._release(pending_request)
            self._assign(pending_request, self._profile(pending_request) or RoutedRequest(), replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._policy.release(replica_id.unique_id, internal_request_id)

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        """Where a request begins to wait, and where a caller that gives up waiting shows: Serve has no hook for it."""
        request = self._profile(pending_request)
        if request is not None and not is_retry:
            self._turns.join(id(pending_request), request.caller, request.tokens)
        self._make_way(pending_request)
        try:
            return await super()._choose_replica_for_request(pending_request, is_retry=is_retry)
        except BaseException:
            self._release(pending_request)
            raise
        finally:
            self._turns.leave(id(pending_request))
            self._tried.pop(id(pending_request), None)

    def _get_next_pending_request_to_route(self) -> PendingRequest | None:
        """Serve's own takes them in order of arrival."""
        queue = self._pending_requests_to_route
        waiting = {id(pending): pending for pending in queue if not pending.future.done()}
        chosen = next((each for each in waiting if each not in self._turns), None) or self._turns.first(waiting)
        pending_request = None if chosen is None else waiting.pop(chosen)
        queue.clear()
        queue.extend(waiting.values())
        if pending_request is not None:
            self._tried[id(pending_request)] = pending_request
        return pending_request

    def _make_way(self, new: PendingRequest) -> None:
        """For one that comes when all tasks are taken, if its turn comes before the last of theirs."""
        tried = [each for each in self._tried if each in self._turns]
        if not tried or self.curr_num_routing_tasks < self.max_num_routing_tasks:
            return
        last = max(tried, key=self._turns.turn)
        if id(new) not in self._turns or self._turns.turn(id(new)) < self._turns.turn(last):
            self._put_back(last)

    def _gives_way(self, pending_request: PendingRequest, replicas: list[str]) -> bool:
        """Whether the place that was found for it is for another one, whose turn comes first. That one is then tried
        for at once, where its task may have paused."""
        other: int | None = getattr(pending_request, _GAVE_WAY, None)
        setattr(pending_request, _GAVE_WAY, None)
        if other is not None and other in self._turns and other not in self._tried:
            return True  # Serve's second try comes at once: the other's task has not begun yet
        first = self._turns.first(self._tried)
        if first in (None, id(pending_request)) or id(pending_request) not in self._turns:
            return False
        request = self._profile(self._tried[first])
        if request is None or not self._policy.rank(request, replicas):  # only those that it avoids have room
            return False
        self._put_back(first)
        setattr(pending_request, _GAVE_WAY, first)
        return True

    def _put_back(self, tried: int) -> None:
        """Its task ends, and another begins, with whoever of the queue comes first."""
        pending_request = self._tried.pop(tried)
        self._cancel_routing_task_for_pending_request(pending_request)
        self._pending_requests_to_route.append(pending_request)

    def _assign(self, pending_request: PendingRequest, request: RoutedRequest, replica: str) -> None:
        self._policy.assign(request, replica, pending_request.metadata.internal_request_id)
        setattr(pending_request, _CHARGED, replica)

    def _release(self, pending_request: PendingRequest) -> None:
        if (replica := getattr(pending_request, _CHARGED, None)) is not None:
            self._policy.release(replica, pending_request.metadata.internal_request_id)
            setattr(pending_request, _CHARGED, None)

    def _profile(self, pending_request: PendingRequest) -> RoutedRequest | None:
        if not hasattr(pending_request, _PROFILE):
            setattr(pending_request, _PROFILE, self._read(pending_request))
        known: RoutedRequest | None = getattr(pending_request, _PROFILE)
        return known

    def _read(self, pending_request: PendingRequest) -> RoutedRequest | None:
        try:
            return profile(pending_request.args)
        except Exception:
            # Raised here it would end Serve's routing task, and the request would wait for ever.
            if not self._warned:
                logger.exception("a request could not be read for routing; it goes by load alone")
                self._warned = True
            return RoutedRequest()
