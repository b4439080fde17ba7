"""The adapter in Serve's own routing loop, with replicas that are no processes."""

import asyncio
from collections import Counter
from types import SimpleNamespace

import pytest
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve.request_router import PendingRequest

from outrider.actors.replica_calls import GenerationRequest
from outrider.actors.serve_seam.request_router import TargetRouter

DEPLOYMENT = DeploymentID("Target", "app")


def replica(name, **stats):
    async def get_queue_len(deadline_s):
        return 0

    return SimpleNamespace(
        replica_id=ReplicaID(name, DEPLOYMENT),
        routing_stats=stats,
        max_ongoing_requests=100,
        get_queue_len=get_queue_len,
    )


def pending(request_id, *args, method="generate"):
    metadata = RequestMetadata(
        request_id=request_id,
        internal_request_id=request_id,
        call_method=method,
        _request_protocol="UNDEFINED",
        multiplexed_model_id="",
        session_id="",
    )
    return PendingRequest(args=list(args), kwargs={}, metadata=metadata)


def generation(request_id, topic=1, **fields):
    ids = tuple([topic] * 256)
    return pending(request_id, GenerationRequest(request_id, prompt_token_ids=ids, **fields))


class Routed:
    """A router with two replicas, and what it did."""

    def __init__(self, max_ongoing_requests=4, names=("a", "b")):
        self.router = TargetRouter(DEPLOYMENT, DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True)
        self.router.initialize_state(max_ongoing_requests=max_ongoing_requests)
        self.router.update_replicas([replica(name) for name in names])

    async def choose(self, request, **options):
        chosen = await self.router._choose_replica_for_request(request, **options)
        return chosen.replica_id.unique_id

    def done(self, name, request_id):
        self.router.on_request_completed(ReplicaID(name, DEPLOYMENT), request_id)

    @property
    def load(self):
        return self.router._policy.load


def test_a_burst_with_one_prefix_is_counted_before_any_of_it_is_sent():
    async def burst():
        routed = Routed(max_ongoing_requests=8)
        return Counter(await asyncio.gather(*(routed.choose(generation(str(n))) for n in range(16)))), routed

    counts, routed = asyncio.run(burst())
    assert counts == {"a": 8, "b": 8}
    assert routed.load.requests("a") == 8


def test_a_full_replica_makes_requests_wait_and_its_room_lets_them_in():
    async def wait():
        routed = Routed(max_ongoing_requests=1)
        homes = [await routed.choose(generation(str(n))) for n in range(2)]
        third = asyncio.create_task(routed.choose(generation("2")))
        await asyncio.sleep(0.05)
        assert not third.done()
        assert sorted(homes) == ["a", "b"]
        control = await asyncio.wait_for(routed.choose(pending("s", method="status")), 60.0)
        assert control in homes, "status is answered all the same"
        routed.done(homes[0], "0")
        assert await asyncio.wait_for(third, 60.0) == homes[0]
        return routed

    routed = asyncio.run(wait())
    assert [routed.load.requests(name) for name in "ab"] == [1, 1]


@pytest.mark.parametrize("gives_up", [False, True])
def test_what_is_over_is_not_counted(gives_up):
    async def end():
        routed = Routed(max_ongoing_requests=1)
        home = await routed.choose(generation("0"))
        other = await routed.choose(generation("1"))
        if gives_up:  # a caller that leaves while it waits, and one whose request is sent and cancelled
            waiting = asyncio.create_task(routed.choose(generation("2")))
            await asyncio.sleep(0.03)
            waiting.cancel()
            await asyncio.wait([waiting])
        routed.done(home, "0")
        routed.done(other, "1")
        routed.done(other, "1")
        return routed

    routed = asyncio.run(end())
    assert [routed.load.requests(name) + routed.load.tokens(name) for name in "ab"] == [0, 0]


def test_a_retry_is_counted_once_and_where_it_went():
    async def retry():
        routed = Routed()
        request = generation("0")
        home = await routed.choose(request)
        other = "b" if home == "a" else "a"
        routed.router.on_replica_actor_died(ReplicaID(home, DEPLOYMENT))
        assert routed.load.requests(home) == 0
        assert await routed.choose(request, is_retry=True) == other
        routed.router.on_request_routed(request, ReplicaID(other, DEPLOYMENT), None)
        routed.done(home, "0")  # of the first attempt, late
        assert routed.load.requests(home) == 0
        assert routed.load.requests(other) == 1

    asyncio.run(retry())


def test_a_request_that_is_routed_again_is_counted_once():
    """Serve routes again what a replica would not take after all."""

    async def route():
        routed = Routed()
        request = generation("0")
        home = await routed.choose(request)
        assert await routed.choose(request, is_retry=True) == home
        assert routed.load.requests(home) == 1

    asyncio.run(route())


def test_a_caller_that_leaves_just_as_it_is_served_is_not_counted():
    async def leave():
        routed = Routed()
        leaving = asyncio.create_task(routed.choose(generation("0")))
        for _ in range(100):
            if any(routed.load.requests(name) for name in "ab"):
                break
            await asyncio.sleep(0)
        assert not leaving.done()
        leaving.cancel()
        await asyncio.wait([leaving])
        assert leaving.cancelled()
        assert [routed.load.requests(name) for name in "ab"] == [0, 0]

    asyncio.run(leave())


def test_serves_own_choice_is_followed():
    """Serve takes the second of the ranking when the first turns out to be full."""

    async def follow():
        routed = Routed()
        request = generation("0")
        home = await routed.choose(request)
        other = "b" if home == "a" else "a"
        routed.router.on_request_routed(request, ReplicaID(other, DEPLOYMENT), None)
        assert [routed.load.requests(name) for name in (home, other)] == [0, 1]

    asyncio.run(follow())


def test_replicas_reports_reach_the_policy():
    async def report():
        routed = Routed()
        routed.router.update_replicas([replica("a", speculation_up=False, serving=True), replica("b", serving=False)])
        assert await routed.choose(generation("0")) == "a", "b does not serve"
        routed.router.update_replicas([replica("a", speculation_up=False), replica("b", serving=True)])
        assert await routed.choose(generation("1", topic=2)) == "b", "a has no drafter"
        assert {await routed.choose(generation("2", topic=3, avoid_replicas=("b",)))} == {"a"}

    asyncio.run(report())


def test_a_request_that_cannot_be_read_is_routed_all_the_same(caplog):
    async def route():
        routed = Routed()
        bad = GenerationRequest("0", prompt_token_ids=(-1,) * 64)
        return await routed.choose(pending("0", bad)), await routed.choose(pending("1", bad))

    assert set(asyncio.run(route())) <= {"a", "b"}
    assert sum("could not be read for routing" in record.message for record in caplog.records) <= 1
