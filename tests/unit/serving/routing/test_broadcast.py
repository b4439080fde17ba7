"""Asking every replica: late and dead ones cost their own answer only."""

import asyncio

import pytest

from outrider.actors.replica_calls import ReplicaReply, sign
from outrider.actors.serve_adapter.broadcast import broadcast


class Call:
    def __init__(self, answer):
        self._answer = answer
        self.cancelled = False

    async def get_async(self):
        return await self._answer()

    def cancel(self):
        self.cancelled = True


class Handle:
    """Has as much of a DeploymentHandle as a broadcast touches."""

    def __init__(self, *answers, known_after_s=0.0):
        self.calls = [Call(answer) for answer in answers]
        self.asked = []
        self._known_after_s = known_after_s

    def broadcast(self, *asked):
        self.asked.append(asked)
        return self

    async def _fetch_replica_results_async(self):
        await asyncio.sleep(self._known_after_s)
        return self.calls


class Replica:
    async def double(self, number):
        return 2 * number


def answering(replica_id, number):
    return lambda: sign(Replica(), replica_id, "double", (number,))


async def never():
    await asyncio.sleep(60)


async def dead():
    raise ConnectionError("gone")


def ask(handle, timeout_s=1.0):
    return asyncio.run(broadcast(handle, "double", 4, timeout_s=timeout_s))


def test_every_replica_answers_by_name():
    handle = Handle(answering("a", 4), answering("b", 5))
    assert ask(handle) == [ReplicaReply("a", value=8), ReplicaReply("b", value=10)]
    assert handle.asked == [("signed_reply", "double", (4,))]


def test_a_late_and_a_dead_replica_cost_their_own_answer_only():
    handle = Handle(never, dead, answering("b", 1))
    first, *others = ask(handle, timeout_s=0.05)
    assert first == ReplicaReply("b", value=2)
    assert [(reply.replica_id, reply.is_late) for reply in others] == [(None, True), (None, False)]
    assert "no answer to double within 0.05 s" in others[0].error
    assert others[1].error == "ConnectionError: gone"
    assert not any(reply.ok for reply in others)
    assert [call.cancelled for call in handle.calls] == [True, False, False], "what is late is not left running"


def test_replicas_that_are_not_known_in_time_are_an_error():
    with pytest.raises(ConnectionError, match=r"asked for double within 0\.02 s"):
        ask(Handle(known_after_s=10), timeout_s=0.02)


def test_a_replicas_own_failure_is_signed():
    reply = asyncio.run(sign(Replica(), "a", "double", ()))
    assert reply.replica_id == "a"
    assert reply.error.startswith("TypeError")
    assert not reply.ok
