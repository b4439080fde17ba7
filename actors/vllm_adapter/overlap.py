"""Overlaps the steps of a deployment without a drafter, as vLLM's async scheduling does.

Each step is launched before the host has read the tokens of the step before it. Every step adds one token to each
request, so positions are known, and the next step takes the token itself from the device. Tokens are chosen as with a
drafter, so a seed gives the same answer. The host reads later the token ids, for penalties and bad words, and whether
each request had a token to choose.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from vllm.v1.outputs import AsyncModelRunnerOutput

from outrider.actors.round.request import Request

UNREAD = -1
"""Stands for a token id that the host has not read yet."""


class Unread(NamedTuple):
    """Holds one step's tokens that the host has not read.

    output: vLLM's AsyncGPUModelRunnerOutput. places: row, request and position in its text of each token.
    """

    output: Any
    places: list[tuple[int, Request, int]]


class Overlap:
    """Fills in the token ids of launched steps, on the rank that chooses tokens."""

    def __init__(self) -> None:
        self._unread: deque[Unread] = deque()

    def chose(self, output: Any, requests: Sequence[Request | None]) -> None:
        """Notes a launched step, whose requests have UNREAD as their last token; None is a row without a token."""
        places = [(row, request, len(request.token_ids) - 1) for row, request in enumerate(requests) if request]
        self._unread.append(Unread(output, places))

    def forget(self, request: Request) -> None:
        """Drops the unread tokens of a request that was preempted; they are chosen again."""
        for _, places in self._unread:
            places[:] = [place for place in places if place[1] is not request]

    def read(self, all_of_them: bool) -> None:
        """Fills in the token ids of all steps but the last, which have arrived, or waits for those of the last too."""
        while len(self._unread) > (not all_of_them):
            output, places = self._unread.popleft()
            output.async_copy_ready_event.synchronize()
            ids = output.sampled_token_ids_cpu.tolist()
            for row, request, position in places:
                request.token_ids[position] = ids[row][0]


class LaterOutput(AsyncModelRunnerOutput):
    """Returns vLLM's output, and reports which requests had no token to choose."""

    def __init__(self, output: Any, statuses: Tensor, report: Callable[[Any, list[int]], None]) -> None:
        """output: vLLM's AsyncGPUModelRunnerOutput. statuses: int32 [B] on the host, copied before the output's ids."""
        self._output, self._statuses, self._report = output, statuses, report

    def get_output(self) -> Any:
        """Waits until the step is done. A thread of the worker calls it."""
        output = self._output.get_output()
        self._report(output, self._statuses.tolist())
        return output
