"""Requests that are ended from outside, at every moment of their lives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from outrider.actors.replica_calls import Deadline, GenerationRequest, RoundOutput, Usage
from outrider.actors.serving.running import RunningRequests

REQUEST = GenerationRequest("r", prompt_text="a", sampling={"n": 2})


def run(script: list[RoundOutput], abort_after: int | None) -> tuple[list[RoundOutput], bool]:
    """What the reader sees of a stream that hangs after its script, aborted once abort_after outputs are read; and
    whether the stream was cancelled."""
    running_requests, cancelled = RunningRequests(), asyncio.Event()

    async def outputs() -> AsyncGenerator[RoundOutput, None]:
        try:
            for output in script:
                yield output
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def read() -> list[RoundOutput]:
        seen: list[RoundOutput] = []
        with running_requests.hold(REQUEST) as running:
            stream = outputs()
            if abort_after == len(script):
                asyncio.get_running_loop().call_later(0.01, running_requests.abort, "r")
            while (output := await running.next(stream)) is not None:
                running.note(output)
                seen.append(output)
                if len(seen) == abort_after and abort_after < len(script):
                    assert running_requests.abort("r")
            await asyncio.sleep(0)  # what was cancelled is not cancelled any more
            await stream.aclose()
            return seen + running.aborted_outputs()

    seen = asyncio.run(read())
    assert REQUEST not in running_requests
    assert not running_requests.abort("r")
    return seen, cancelled.is_set()


def test_a_waiting_request_is_ended_while_it_waits() -> None:
    seen, cancelled = run([], abort_after=0)
    assert cancelled
    assert [(output.index, output.finish_reason, output.usage) for output in seen] == [
        (0, "abort", Usage(0, 0)),
        (1, "abort", Usage(0, 0)),
    ]


def test_between_two_outputs_only_the_answers_that_go_on_are_ended() -> None:
    script = [
        RoundOutput("a", (1, 2), usage=Usage(5, 2, 3)),
        RoundOutput("b", (3,), "stop", usage=Usage(5, 3, 3)),
        RoundOutput("never", (4,), index=1),
    ]
    seen, _ = run(script, abort_after=2)
    assert [output.text for output in seen] == ["a", "b", ""]
    assert (seen[-1].index, seen[-1].finish_reason, seen[-1].usage) == (1, "abort", Usage(5, 0, 3))


def test_a_reader_that_is_cancelled_by_somebody_else_stays_cancelled() -> None:
    async def read() -> None:
        async def forever() -> AsyncGenerator[RoundOutput, None]:
            await asyncio.sleep(60)
            yield RoundOutput("", ())

        requests = RunningRequests()

        async def hold() -> None:
            with requests.hold(REQUEST) as running:
                await running.next(forever())

        task = asyncio.create_task(hold())
        await asyncio.sleep(0.01)
        task.cancel()
        requests.abort("r")
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(read())


def test_an_answer_that_is_over_gets_nothing_more() -> None:
    with RunningRequests().hold(REQUEST) as running:
        running.note(RoundOutput("a", (1,), "stop", usage=Usage(1, 1)))
        with pytest.raises(RuntimeError, match="answer 0"):
            running.note(RoundOutput("b", (2,)))
        with pytest.raises(RuntimeError, match="answer 2"):
            running.note(RoundOutput("b", (2,), index=2))


def test_a_deadline_ends_the_wait() -> None:
    async def wait() -> None:
        async def forever() -> AsyncGenerator[RoundOutput, None]:
            await asyncio.sleep(60)
            yield RoundOutput("", ())

        with RunningRequests().hold(GenerationRequest("r", prompt_text="a", deadline=Deadline.after(-1.0))) as running:
            await running.next(forever())

    with pytest.raises(TimeoutError):
        asyncio.run(wait())
