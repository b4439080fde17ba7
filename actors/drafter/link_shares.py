"""Who is next where several links share a drafter: start-time fair queueing among them, by what they have had. Pure.

Every link has a virtual time. A step of the model's moves it on by the link's share of that step (of the tokens fed:
main lines, side branches and prefill chunks alike), divided by the link's weight, and whoever's time is least
is served first. The clock itself shows where the last step began for the furthest of those in it. A link that had all
it asked for starts there, however long it asked for nothing: what it left to others is theirs. One whose rows or
prompts had to wait keeps its place. This is Start-time Fair Queuing (Goyal, Vin and Cheng, SIGCOMM 1996), with tokens
for cost as in the Virtual Token Counter of LLM servers (Sheng et al., OSDI 2024), and three rules of our own:

- A link's weight is what its drafts bring: the share of them that its target accepts, with a floor.
- Nobody is behind the clock by more than a few steps. Steps of rows and of prompts take turns by another rule
  (`DraftModelProposer.plan`), and a link whose prompts wait while others have rows shall not be owed more and more.
- In any one step a link gets half of its share at least, in whole pieces, whatever it had before, if it has that much
  to do: 32 long prompts of a link that was held back must not keep another's short one waiting.

With one link all of this decides nothing: its sequences are served in the order they have among themselves.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Mapping
from typing import TypeVar

from outrider.actors.drafter.outcomes import USUAL_ACCEPTANCE, Frequency

T = TypeVar("T")

MIN_WEIGHT = 0.25
"""Of a link whose drafts are hardly ever accepted, where one whose drafts always are has 1."""

MAX_LAG_STEPS = 4.0
"""Furthest behind the clock: as many steps as a prompt may have to wait for its next chunk."""


class _Link:
    def __init__(self) -> None:
        self.start = 0.0
        """Its virtual time: where its share of the next step begins."""

        self.steps = 0.0
        self.num_sequences = 0
        self.held_back = False
        self.accepted = Frequency()

    @property
    def weight(self) -> float:
        return max(self.accepted.given(USUAL_ACCEPTANCE), MIN_WEIGHT)


class LinkShares:
    """Of all links with sequences. Units of virtual time: steps of a link that has weight 1 and a step to itself."""

    def __init__(self) -> None:
        self._links: dict[int, _Link] = {}
        self._busy: dict[int, _Link] = {}
        """Those with open sequences."""

        self._clock = 0.0

    @property
    def contended(self) -> bool:
        """More than one link has sequences."""
        return len(self._busy) > 1

    def opened(self, link_id: int) -> None:
        """A sequence of the link's."""
        link = self._links.setdefault(link_id, _Link())
        link.num_sequences += 1
        self._busy[link_id] = link

    def closed(self, link_id: int) -> None:
        link = self._links[link_id]
        link.num_sequences -= 1
        if not link.num_sequences:
            link.held_back = False
            del self._busy[link_id]

    def unlink(self, link_id: int) -> None:
        """The link is gone, and its sequences before it."""
        self._links.pop(link_id, None)

    def verified(self, link_id: int, right: int, looked_at: int) -> None:
        """The link's target looked at so many drafts, up to the first that was not right."""
        self._links[link_id].accepted.add(right, looked_at)

    def steps(self) -> dict[int, float]:
        """How many of the model's steps every link has had; a step that they shared counts in parts."""
        return {link_id: link.steps for link_id, link in self._links.items()}

    def begin(self) -> None:
        """A step is about to be planned: who was not held back gets no credit for what it left to others."""
        for link in self._busy.values():
            earliest = self._clock - MAX_LAG_STEPS if link.held_back else self._clock
            link.start = max(link.start, earliest)

    def time_of(self, link_id: int) -> float:
        return self._links[link_id].start

    def charge(self, fed: Mapping[int, int], held_back: Collection[int] = ()) -> None:
        """A step was planned. fed: tokens of each link that is in it. held_back: links whose target waits for what is
        not in it."""
        total = sum(fed.values())
        links = {link_id: self._links[link_id] for link_id in fed}
        self._clock = max(self._clock, *(link.start for link in links.values()))
        for link_id, link in links.items():
            share = fed[link_id] / total
            link.steps += share
            link.start += share / link.weight
        for link_id, link in self._busy.items():
            link.held_back = link_id in held_back

    def turns(self, capacity: int) -> Turns:
        """capacity: what a step holds, in the unit of what is given."""
        times = {link_id: (link.start, 1 / link.weight) for link_id, link in self._busy.items()}
        return Turns(times, capacity)


class Turns:
    """Whose turn it is within a step that is being planned."""

    def __init__(self, times: Mapping[int, tuple[float, float]], capacity: int) -> None:
        """times: of every link where its share begins, and what it pays for a whole step."""
        self._starts = {link_id: start for link_id, (start, _) in times.items()}
        self._prices = {link_id: price / capacity for link_id, (_, price) in times.items()}
        self._capacity = capacity
        self._levelled = False

    def gave(self, link_id: int, amount: int) -> None:
        self._starts[link_id] += amount * self._prices[link_id]

    def over(self, queues: Mapping[int, Iterator[T]]) -> Iterator[T]:
        """All that is in the queues, of each in its order; from the next link whenever that is behind the others in
        what it was given. A second time it goes on where the first ended."""
        firsts = {link_id: item for link_id, queue in queues.items() if (item := next(queue, None)) is not None}
        self._level(firsts)
        heap = [(self._starts[link_id], link_id, item) for link_id, item in firsts.items()]
        heapq.heapify(heap)
        while heap:
            _, link_id, item = heap[0]
            yield item
            following = next(queues[link_id], None)
            if following is None:
                heapq.heappop(heap)
            else:
                heapq.heapreplace(heap, (self._starts[link_id], link_id, following))

    def _level(self, link_ids: Collection[int]) -> None:
        """Those far behind take less than half of the step before the others have their turn."""
        if self._levelled or len(link_ids) < 2:
            return
        self._levelled = True
        half_a_step = 0.5 / sum(1 / (self._prices[link_id] * self._capacity) for link_id in link_ids)
        earliest = max(self._starts[link_id] for link_id in link_ids) - half_a_step
        for link_id in link_ids:
            self._starts[link_id] = max(self._starts[link_id], earliest)
