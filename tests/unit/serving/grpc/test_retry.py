"""A request that is lost before it has begun goes to another replica; one that has begun does not."""

import asyncio
from contextlib import aclosing

import pytest
from ray.exceptions import ActorDiedError, RayTaskError
from ray.serve.exceptions import BackPressureError

from outrider.actors.observability.metrics import METRICS
from outrider.actors.replica_calls import ReplicaLost
from outrider.actors.serving import running as retry
from outrider.actors.serving.running import retried


class Call:
    """Gives messages, then raises error, or ends."""

    def __init__(self, *messages, error=None):
        self._messages, self._error = messages, error
        self.cancelled = False

    async def __aiter__(self):
        for message in self._messages:
            await asyncio.sleep(0)
            yield message
        if self._error is not None:
            raise self._error

    def cancel(self):
        self.cancelled = True


class Sender:
    """One call after the other."""

    def __init__(self, *calls):
        self.calls = list(calls)
        self.avoided = []

    def __call__(self, avoid):
        self.avoided.append(avoid)
        return self.calls[len(self.avoided) - 1]


DIED = ActorDiedError()
FULL = BackPressureError(num_queued_requests=1, max_queued_requests=1)


def lost(replica):
    return RayTaskError("generate", "traceback", ReplicaLost(replica, "the engine is gone")).as_instanceof_cause()


async def read(sender, max_retries=2, **options):
    async with aclosing(retried(sender, max_retries=max_retries, request_id="r", **options)) as stream:
        return [message async for message in stream]


def test_what_has_not_begun_is_sent_again():
    sender = Sender(Call(error=DIED), Call(1, 2))
    assert asyncio.run(read(sender)) == [1, 2]
    assert [call.cancelled for call in sender.calls] == [True, False]


def test_what_has_begun_is_not():
    sender = Sender(Call(1, error=DIED), Call(1, 2))
    with pytest.raises(ActorDiedError):
        asyncio.run(read(sender))
    assert len(sender.avoided) == 1


def test_a_replica_that_says_so_itself_is_avoided():
    sender = Sender(Call(error=lost("a")), Call(error=lost("b")), Call(3))
    assert asyncio.run(read(sender)) == [3]
    assert sender.avoided == [(), ("a",), ("a", "b")]


@pytest.mark.parametrize("max_retries", [0, 2])
def test_retries_are_counted(max_retries):
    sender = Sender(*[Call(error=DIED)] * 5)
    with pytest.raises(ActorDiedError):
        asyncio.run(read(sender, max_retries))
    assert len(sender.avoided) == 1 + max_retries


@pytest.mark.parametrize("error", [ValueError("bad"), FULL, TimeoutError()])
def test_other_errors_are_the_callers(error):
    sender = Sender(Call(error=error), Call(1))
    with pytest.raises(type(error)):
        asyncio.run(read(sender))
    assert len(sender.avoided) == 1


def test_one_that_was_admitted_waits_for_room_in_the_queue(monkeypatch):
    monkeypatch.setattr(retry, "_FIRST_PAUSE_S", 0.001)
    sender = Sender(Call(error=DIED), Call(error=FULL), Call(error=FULL), Call(1))
    assert asyncio.run(read(sender, max_retries=1)) == [1]


def test_but_not_for_ever(monkeypatch):
    monkeypatch.setattr(retry, "_FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(retry, "QUEUE_PATIENCE_S", 0.01)
    sender = Sender(Call(error=DIED), *[Call(error=FULL)] * 50)
    with pytest.raises(BackPressureError):
        asyncio.run(read(sender))


def test_what_comes_before_the_answer_is_held_back():
    sender = Sender(Call("head", error=DIED), Call("head", 1, 2))
    assert asyncio.run(read(sender, has_begun=lambda message: message != "head")) == ["head", 1, 2]
    assert asyncio.run(read(Sender(Call("head")), has_begun=lambda message: message != "head")) == ["head"]


def test_leaving_cancels_the_call():
    async def leave():
        sender = Sender(Call(1, 2, 3))
        async with aclosing(retried(sender, max_retries=2, request_id="r")) as stream:
            assert await anext(stream) == 1
        return sender

    sender = asyncio.run(leave())
    assert sender.calls[0].cancelled
    assert len(sender.avoided) == 1


def test_a_deadline_cancels_the_call():
    class Silent(Call):
        async def __aiter__(self):
            await asyncio.sleep(60)
            yield

    async def wait():
        async with asyncio.timeout(0.01):
            await read(sender)

    sender = Sender(Silent(), Call(1))
    with pytest.raises(TimeoutError):
        asyncio.run(wait())
    assert sender.calls[0].cancelled
    assert len(sender.avoided) == 1


def test_the_error_says_which_replica():
    assert str(lost("a").cause) == "replica a: the engine is gone"


def test_a_full_queue_counts_as_refused_once_it_is_final():
    before = METRICS.num_refused_generations
    with pytest.raises(BackPressureError):
        asyncio.run(read(Sender(Call(error=FULL))))
    assert METRICS.num_refused_generations == before + 1
    assert asyncio.run(read(Sender(Call(error=DIED), Call(error=FULL), Call(1)))) == [1]
    assert METRICS.num_refused_generations == before + 1
