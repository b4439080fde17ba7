"""Steps of a deployment without a drafter, which overlap as vLLM's own do: each is launched before anybody has read
what the one before it chose.

Every step brings each request one token, so positions are known without it, and the token itself stays on the device,
where the next step takes it from. Our choice of it, and so a seed's answer, is the same as with a drafter. What is read
later: the token's id, for penalties and bad words, and whether there was one to choose.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from vllm.v1.outputs import AsyncModelRunnerOutput

from outrider.actors.round.request import Request

UNREAD = -1
"""In place of a token's id, on the host."""


class Unread(NamedTuple):
    """One step's tokens. output: vLLM's AsyncGPUModelRunnerOutput. places: of each row that has a token, whose it is
    and where in its text."""

    output: Any
    places: list[tuple[int, Request, int]]


class Overlap:
    """Of one rank that chooses."""

    def __init__(self) -> None:
        self._unread: deque[Unread] = deque()

    def chose(self, output: Any, requests: Sequence[Request | None]) -> None:
        """A step's output, and its requests by row, None where none got a token: each one's text has UNREAD for it."""
        places = [(row, request, len(request.token_ids) - 1) for row, request in enumerate(requests) if request]
        self._unread.append(Unread(output, places))

    def forget(self, request: Request) -> None:
        """Its tokens on their way are nobody's: it was preempted, and they are chosen anew."""
        for _, places in self._unread:
            places[:] = [place for place in places if place[1] is not request]

    def read(self, all_of_them: bool) -> None:
        """Put ids in their places: those of all steps but the last, which are there by now, or waiting for the last
        one's too."""
        while len(self._unread) > (not all_of_them):
            output, places = self._unread.popleft()
            output.async_copy_ready_event.synchronize()
            ids = output.sampled_token_ids_cpu.tolist()
            for row, request, position in places:
                request.token_ids[position] = ids[row][0]


class LaterOutput(AsyncModelRunnerOutput):
    """vLLM's, and whether each request could be given a token."""

    def __init__(self, output: Any, statuses: Tensor, report: Callable[[Any, list[int]], None]) -> None:
        """output: vLLM's AsyncGPUModelRunnerOutput. statuses: int32 [B] of the host's, on their way since before its
        copies."""
        self._output, self._statuses, self._report = output, statuses, report

    def get_output(self) -> Any:
        """By a thread of the worker's own; blocks until the step is done."""
        output = self._output.get_output()
        self._report(output, self._statuses.tolist())
        return output
