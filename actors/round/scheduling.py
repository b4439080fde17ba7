"""Orders the target's requests, and bounds a long prompt's share of a step.

Requests are served by *virtual arrival*: when they came, plus a delay that grows with their size and ends at a limit.
A small request overtakes large ones that came shortly before it; nobody is overtaken by one that came more than the
limit after it. So neither many small requests nor a few huge ones can keep the others waiting for ever.

Where callers are told apart, each has a clock that its requests advance by their size, and a request counts as having
come when the ones before it are done by that clock (start-time fair queueing, Goyal et al. 1996, with the monotonic
clock for the system's virtual time). A caller that asks for much comes behind one that asks for little, within the
same limit.
"""

from __future__ import annotations

DELAY_MS_PER_TOKEN = 2.0
"""Roughly the cost of a token of a long prompt on a small replica. Only differences between requests matter."""

MAX_COUNTED_ANSWER_TOKENS = 512
"""Caps the answer in a request's size: clients leave max_tokens at its largest, and few answers get there."""

LONG_PREFILL_SHARE = 0.75
"""The share of a step's tokens for all prompts that need several steps, while there is anything else to do."""

_PRIORITY_STEP_MS = 1 << 43
"""The distance between two of vLLM's priorities, 278 years: a lower one is served first whatever the size."""

_MOST_CLOCKS = 1024
"""The number of callers' clocks above which those that have run out are dropped."""

MAX_OVERTAKING_S = 10.0
"""How much later a small request may come and still be served before a larger one that waits."""


class FairOrder:
    """Orders all requests of an engine. Not thread-safe."""

    def __init__(self, max_overtaking_s: float) -> None:
        """max_overtaking_s: the limit above; with 0, requests are served in order of arrival."""
        self._limit_ms = max_overtaking_s * 1e3
        self._clocks: dict[int, float] = {}
        """By caller, where requests have advanced it beyond the current time."""

    def virtual_arrival_ms(
        self,
        arrival_s: float,
        prompt_tokens: int,
        max_tokens: int,
        *,
        caller: int = 0,
        priority: int = 0,
        answer: int = 0,
    ) -> int:
        """Returns the place of a new sequence in the queue, in milliseconds: the lower, the sooner.

        Args:
            caller: 0 if unknown.
            priority: vLLM's, lower first.
            answer: the sequence's index among the n answers of its request. Each further answer comes later, beyond
                the limit too, so that requests of many answers do not keep others waiting.
        """
        arrival_ms = arrival_s * 1e3
        delay_ms = (prompt_tokens + min(max_tokens, MAX_COUNTED_ANSWER_TOKENS)) * DELAY_MS_PER_TOKEN
        latest_ms = arrival_ms + (1 + answer) * self._limit_ms
        virtual_ms = min(max(arrival_ms, self._clocks.get(caller, arrival_ms)) + (1 + answer) * delay_ms, latest_ms)
        if caller and not answer:
            if len(self._clocks) >= _MOST_CLOCKS:
                self._clocks = {each: ms for each, ms in self._clocks.items() if ms > arrival_ms}
            self._clocks[caller] = virtual_ms
        return round(virtual_ms) + priority * _PRIORITY_STEP_MS


def prefill_threshold(max_num_batched_tokens: int, num_prefills: int, at_least: int) -> int:
    """Returns the most tokens of one request in a step while num_prefills prompts are being read.

    at_least: what every request may have, whatever the prompts leave: a round's own tokens, 1 + K.
    """
    share = int(max_num_batched_tokens * LONG_PREFILL_SHARE)
    return max(at_least, share // max(1, num_prefills))
