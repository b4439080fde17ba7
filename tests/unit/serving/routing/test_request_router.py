"""The router in Serve's own routing loop, with replicas that are no processes."""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve.request_router import PendingRequest

from outrider.actors.serve_adapter import request_router
from outrider.actors.serve_adapter.request_router import TargetRouter
from outrider.actors.serving.routing.request_profile import RoutedRequest, token_fingerprint

DEPLOYMENT = DeploymentID("Target", "app")
HANG_GUARD_S = 60.0


@dataclass
class Call:
    routed: RoutedRequest
    avoid_replicas: tuple[str, ...] = ()


def replica(name, hangs=False, **stats):
    async def get_queue_len(deadline_s):
        return await asyncio.sleep(HANG_GUARD_S if hangs else 0, 0)

    return SimpleNamespace(
        replica_id=ReplicaID(name, DEPLOYMENT),
        routing_stats=stats,
        max_ongoing_requests=100,
        get_queue_len=get_queue_len,
    )


def pending(request_id, *args):
    names = {"call_method": "generate", "_request_protocol": "UNDEFINED", "multiplexed_model_id": "", "session_id": ""}
    metadata = RequestMetadata(request_id=request_id, internal_request_id=request_id, **names)
    return PendingRequest(args=list(args), kwargs={}, metadata=metadata)


def generation(request_id, topic=1, avoid=()):
    return pending(request_id, Call(RoutedRequest(token_fingerprint([topic] * 256), 256, 64, True), avoid))


class Routed:
    """A router, and who waits for a place."""

    def __init__(self, max_ongoing_requests=4, names=("a", "b")):
        self.router = TargetRouter(DEPLOYMENT, DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True)
        self.router.initialize_state(max_ongoing_requests=max_ongoing_requests)
        self.router.update_replicas([replica(name) for name in names])
        self.homes, self.tasks = {}, {}

    async def choose(self, request, **options):
        choosing = self.router._choose_replica_for_request(request, **options)
        return (await asyncio.wait_for(choosing, HANG_GUARD_S)).replica_id.unique_id

    def come(self, *names):
        async def place(name):
            self.homes[name] = await self.choose(generation(name))

        self.tasks |= {name: asyncio.create_task(place(name)) for name in names}

    async def settle(self):
        """Until nobody can go on without an event from outside."""
        for _ in range(20):
            await asyncio.sleep(0.001)

    def done(self, name, request_id):
        self.router.on_request_completed(ReplicaID(name, DEPLOYMENT), request_id)

    def requests(self, names="ab"):
        return [self.router._policy.load.requests(name) for name in names]


async def test_a_burst_with_one_prefix_is_counted_before_any_of_it_is_sent():
    routed = Routed(max_ongoing_requests=8)
    assert Counter(await asyncio.gather(*(routed.choose(generation(str(n))) for n in range(16)))) == {"a": 8, "b": 8}
    assert routed.requests() == [8, 8]


async def test_places_are_given_in_order_of_arrival():
    routed = Routed(max_ongoing_requests=1, names=("a",))
    names = [f"g{number}" for number in range(9)]
    routed.come(*names)
    for number, name in enumerate(names):
        await routed.settle()
        assert list(routed.homes) == names[: number + 1]
        routed.done("a", name)


@pytest.mark.parametrize("steps", range(6))
async def test_a_request_that_comes_as_a_place_is_free_waits_for_those_before_it(steps):
    routed = Routed(max_ongoing_requests=1, names=("a",))
    routed.come("g0", "g1", "g2")
    await routed.settle()
    routed.come("late")
    for _ in range(steps):
        await asyncio.sleep(0)
    routed.done("a", "g0")
    await routed.settle()
    routed.done("a", "g1")
    await routed.settle()
    assert list(routed.homes) == ["g0", "g1", "g2"]
    routed.tasks["late"].cancel()


async def test_a_full_replica_gets_a_control_call_however_many_wait():
    routed = Routed(max_ongoing_requests=1, names=("a",))
    routed.come(*(f"g{number}" for number in range(40)))
    await routed.settle()
    assert len(routed.homes) == 1
    assert await routed.choose(pending("status")) == "a"
    assert await routed.choose(pending("abort", "some-id")) == "a"
    for task in routed.tasks.values():
        task.cancel()


async def test_a_caller_that_gives_up_takes_no_place_and_is_not_counted():
    routed = Routed(max_ongoing_requests=1, names=("a",))
    routed.come("g0", "g1", "g2", "g3")
    await routed.settle()
    for name in ("g1", "g2"):
        routed.tasks[name].cancel()
    await routed.settle()
    routed.done("a", "g0")
    await routed.settle()
    assert list(routed.homes) == ["g0", "g3"]
    routed.done("a", "g3")
    routed.done("a", "g3")
    assert routed.requests("a") == [0]


async def test_a_request_that_was_sent_keeps_its_place(monkeypatch):
    monkeypatch.setattr(request_router, "SENT_WITHIN_S", 0.001)
    routed = Routed(names=("a",))
    request = generation("g0")
    await routed.choose(request)
    routed.router.on_request_routed(request, ReplicaID("a", DEPLOYMENT), None)
    await routed.settle()
    assert routed.requests("a") == [1]


async def test_a_retry_is_counted_once_and_where_it_went():
    routed = Routed()
    request = generation("0")
    home = await routed.choose(request)
    assert await routed.choose(request, is_retry=True) == home
    assert sum(routed.requests()) == 1, "routed again, as when the replica would not take it"
    other = "b" if home == "a" else "a"
    second = generation("1")
    await routed.choose(second)
    routed.router.on_request_routed(second, ReplicaID(other, DEPLOYMENT), None)
    assert routed.requests([home, other]) == [1, 1], "Serve took the other one, since the first was full"
    routed.done(other, "1")
    routed.router.on_replica_actor_died(ReplicaID(home, DEPLOYMENT))
    assert await routed.choose(request, is_retry=True) == other
    routed.router.on_request_routed(request, ReplicaID(other, DEPLOYMENT), None)
    routed.done(home, "0")  # of the first attempt, late
    assert routed.requests([home, other]) == [0, 1]


async def test_replicas_reports_reach_the_policy():
    routed = Routed()
    routed.router.update_replicas([replica("a", speculation_up=False, serving=True), replica("b", serving=False)])
    assert await routed.choose(generation("0")) == "a", "b does not serve"
    routed.router.update_replicas([replica("a", speculation_up=False), replica("b", serving=True)])
    assert await routed.choose(generation("1", topic=2)) == "b", "a has no drafter"
    assert await routed.choose(generation("2", topic=3, avoid=("b",))) == "a"
    routed.router.on_replica_actor_unavailable(ReplicaID("b", DEPLOYMENT))
    assert await routed.choose(generation("3", topic=4)) == "a"


@pytest.mark.parametrize("seed", range(12))
async def test_nobody_waits_for_ever(seed):
    """Callers come and leave, answers end, replicas come, die and are all gone for a while."""
    traffic, routed, ended = random.Random(seed), Routed(2, ("r0", "r1")), set()
    for step in range(300):
        what, waiting = traffic.random(), [name for name, task in routed.tasks.items() if not task.done()]
        running = sorted(routed.homes.keys() - ended)
        if what < 0.45:
            routed.come(f"{step}")
        elif what < 0.55 and waiting:
            routed.tasks[traffic.choice(waiting)].cancel()
        elif what < 0.65:
            names = {f"r{traffic.randint(0, 3)}" for _ in range(traffic.randint(0, 3))}
            routed.router.update_replicas([replica(name) for name in sorted(names)])
        elif running:
            ended.add(name := traffic.choice(running))
            routed.done(routed.homes[name], name)
        await asyncio.sleep(traffic.choice((0, 0, 0, 0.001)))
    routed.router.update_replicas([replica("r0"), replica("r9")])
    async with asyncio.timeout(HANG_GUARD_S):
        while not all(task.done() for task in routed.tasks.values()):
            for name in routed.homes.keys() - ended:
                ended.add(name)
                routed.done(routed.homes[name], name)
            await asyncio.sleep(0.001)
    for name in routed.homes.keys() - ended:
        routed.done(routed.homes[name], name)
    assert routed.requests(["r0", "r9"]) == [0, 0]
