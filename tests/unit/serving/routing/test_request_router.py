"""The adapter in Serve's own routing loop, with replicas that are no processes."""

import asyncio
import random
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


class Telling(TargetRouter):
    """What its tasks have looked for a place for, in order."""

    def initialize_state(self, **settings):
        super().initialize_state(**settings)
        self.tried = []

    def _get_next_pending_request_to_route(self):
        chosen = super()._get_next_pending_request_to_route()
        if chosen is not None:
            self.tried.append(chosen.metadata.request_id)
        return chosen


class Routed:
    """A router with two replicas, and what it did."""

    def __init__(self, max_ongoing_requests=4, names=("a", "b")):
        self.router = Telling(DEPLOYMENT, DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True)
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


class Crowd:
    """Requests that wait for the only place there is, and in what order they get one."""

    def __init__(self, max_ongoing_requests=1, names=("a",)):
        self.routed = Routed(max_ongoing_requests, names)
        self.tasks, self.order, self.homes = {}, [], {}
        self.served = asyncio.Event()

    def come(self, name, **fields):
        async def wait():
            self.homes[name] = await self.routed.choose(generation(name, **fields))
            self.order.append(name)
            self.served.set()

        self.tasks[name] = asyncio.create_task(wait())

    async def tries(self, name):
        """Until a task does, for a place for it."""
        async with asyncio.timeout(60.0):
            while name not in self.routed.router.tried:  # noqa: ASYNC110 - told by Serve's own tasks
                await asyncio.sleep(0.001)

    async def give_up(self, name):
        self.tasks[name].cancel()
        await asyncio.wait([self.tasks[name]])

    async def end(self, name):
        """Until somebody has its place."""
        self.served.clear()
        self.routed.done(self.homes[name], name)
        await asyncio.wait_for(self.served.wait(), 60.0)

    async def serve_all(self):
        for number in range(len(self.tasks)):
            if len(self.order) == len([task for task in self.tasks.values() if not task.cancelled()]):
                break
            await self.end(self.order[number])

    def callers(self):
        """Of those that were served, by the letters that their names begin with."""
        return "".join(name[0] for name in self.order)

    def is_over(self):
        router = self.routed.router
        return not (router._turns._callers or router._tried or router._pending_requests_to_route)


async def crowd_of(number, **fields):
    """One has the place; Serve's two tasks have tried for the next ones, and the others are queued."""
    crowd = Crowd()
    for each in range(number):
        crowd.come(f"g{each}", **fields)
    await crowd.tries("g2")
    assert crowd.order == ["g0"]
    return crowd


def test_the_next_place_is_for_a_caller_that_has_had_none():
    async def wait():
        crowd = await crowd_of(8, caller=1)
        crowd.come("m0", caller=2)
        crowd.come("m1", caller=2)
        await crowd.serve_all()
        return crowd

    crowd = asyncio.run(wait())
    assert crowd.callers() == "gmgmgggggg"
    assert crowd.is_over()


@pytest.mark.parametrize("callers", [(1, 2), (0, 0)])
def test_a_request_that_comes_as_a_place_is_free_does_not_get_it_before_one_that_waits(callers):
    async def wait():
        crowd = Crowd()
        crowd.come("g0", caller=callers[0])
        await crowd.tries("g0")
        crowd.come("m0", caller=callers[1])
        await crowd.tries("m0")
        for number in range(1, 6):
            crowd.come(f"g{number}", caller=callers[0])
            await crowd.end(crowd.order[-1])
        while len(crowd.order) < len(crowd.tasks):
            await crowd.end(crowd.order[-1])
        return crowd

    crowd = asyncio.run(wait())
    assert crowd.callers() == "gmggggg"
    assert crowd.is_over()


def test_larger_requests_have_fewer_turns():
    async def wait():
        crowd = await crowd_of(6, caller=1, sampling={"n": 4, "max_tokens": 256})
        for number in range(8):
            crowd.come(f"m{number}", caller=2, sampling={"max_tokens": 1})
        await crowd.serve_all()
        return crowd

    crowd = asyncio.run(wait())
    # 1,280 tokens and 257: the clocks of both are at 1,280 and 1,285 when five small ones have been served.
    assert crowd.callers() == "gmmmmmgmmmgggg"


def test_without_keys_places_are_given_in_order_of_arrival():
    async def wait():
        crowd = await crowd_of(5, sampling={"max_tokens": 200})
        for number in range(5, 9):
            crowd.come(f"g{number}", sampling={"max_tokens": 1})
        await crowd.serve_all()
        return crowd

    crowd = asyncio.run(wait())
    assert crowd.order == [f"g{number}" for number in range(9)]
    assert crowd.is_over()


def test_a_lone_full_replica_hears_a_control_call_however_many_wait():
    async def ask():
        crowd = await crowd_of(6)
        assert await asyncio.wait_for(crowd.routed.choose(pending("s", method="status")), 60.0) == "a"
        await crowd.serve_all()
        return crowd

    crowd = asyncio.run(ask())
    assert sorted(crowd.order) == [f"g{number}" for number in range(6)], "and nobody has lost its turn by it"
    assert crowd.is_over()


def test_who_gives_up_takes_no_place():
    async def leave():
        crowd = await crowd_of(6, caller=1)
        for number in range(3):
            crowd.come(f"m{number}", caller=2)
        await crowd.tries("m0")
        await crowd.give_up("m0")
        await crowd.give_up("m2")
        await crowd.give_up("g1")
        await crowd.serve_all()
        return crowd

    crowd = asyncio.run(leave())
    assert crowd.callers() == "gmgggg"
    assert crowd.is_over()


def test_a_request_that_is_routed_again_has_had_its_turn():
    async def again():
        crowd = await crowd_of(4, caller=1)
        request = generation("m", caller=2)
        crowd.tasks["m"] = asyncio.create_task(crowd.routed.choose(request))
        await crowd.tries("m")
        crowd.routed.done("a", "g0")
        await crowd.tasks.pop("m")
        crowd.come("n", caller=3)
        retried = asyncio.create_task(crowd.routed.choose(request, is_retry=True))
        assert await asyncio.wait_for(retried, 60.0) == "a", "whose place it has"
        assert crowd.order == ["g0"]

    asyncio.run(again())


@pytest.mark.parametrize("seed", range(12))
def test_nobody_waits_for_ever(seed):
    """Callers come and leave, answers end, replicas come, die and are all gone for a while."""

    async def run():
        traffic = random.Random(seed)
        crowd = Crowd(max_ongoing_requests=2, names=("r0", "r1"))
        running, replicas, ended, controls = set(), ["r0", "r1"], set(), []
        for step in range(300):
            what = traffic.random()
            waiting = [name for name, task in crowd.tasks.items() if not task.done()]
            running = set(crowd.order) - ended
            if what < 0.4:
                fields = {"caller": traffic.randint(0, 3), "sampling": {"max_tokens": traffic.randint(1, 256)}}
                crowd.come(f"{step}", **fields)
            elif what < 0.5 and waiting:
                crowd.tasks[traffic.choice(waiting)].cancel()
            elif what < 0.55:
                controls.append(asyncio.create_task(crowd.routed.choose(pending(f"s{step}", method="status"))))
            elif what < 0.65:
                replicas = [f"r{traffic.randint(0, 3)}" for _ in range(traffic.randint(0, 3))]
                crowd.routed.router.update_replicas([replica(name) for name in dict.fromkeys(replicas)])
            elif running:
                name = traffic.choice(sorted(running))
                ended.add(name)
                crowd.routed.done(crowd.homes[name], name)
            await asyncio.sleep(traffic.choice((0, 0, 0, 0.001)))
        crowd.routed.router.update_replicas([replica("r0"), replica("r9")])

        async def finish():
            while not all(task.done() for task in crowd.tasks.values()):
                for name in set(crowd.order) - ended:
                    ended.add(name)
                    crowd.routed.done(crowd.homes[name], name)
                await asyncio.sleep(0.001)
            await asyncio.gather(*controls)

        await asyncio.wait_for(finish(), 60.0)
        for name in set(crowd.order) - ended:
            crowd.routed.done(crowd.homes[name], name)
        assert crowd.is_over()
        assert all(crowd.routed.load.requests(name) == 0 for name in ("r0", "r9"))

    asyncio.run(run())
