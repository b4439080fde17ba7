"""How much an ingress takes on: the answers and tokens that all of its requests together may come to.

Requests are counted where they are queued (see outrider.actors.serving.gate, and Serve's own max_queued_requests); but
one request may ask for 64 answers, for a prompt as long as the model takes, or for 21 log-probabilities of each of its
tokens, and hold a place like any other. One
key's requests leave room for other keys', here as in the proxies.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ray.serve.exceptions import BackPressureError

from outrider.actors.openai_calls import OpenAIRequest
from outrider.actors.replica_calls import GenerationRequest, RequestError
from outrider.actors.request_costs import tokens_in_flight
from outrider.actors.serving.capacity import part_of
from outrider.actors.serving.failures import CallFailure, Refusal, queue_full
from outrider.actors.serving.shares import SHARE_OF_FREE, Shares
from outrider.cluster.limits import LimitsConfig


class KeyShareTaken(Refusal):
    """There is room, but not for more of this key's."""

    def __init__(self, request_id: str) -> None:
        super().__init__(request_id)
        self._request_id = request_id

    def failure(self) -> CallFailure:
        return queue_full(self._request_id, for_the_key=True)


class Admission:
    """Of one ingress, for its event loop."""

    def __init__(self, limits: LimitsConfig, num_ingresses: int = 1) -> None:
        """num_ingresses: each lets in its part."""
        self._max_sequences = part_of(limits.max_sequences, num_ingresses)
        self._max_tokens = part_of(limits.max_tokens_in_flight, num_ingresses)
        self._most_of_one = max(1, self._max_tokens * SHARE_OF_FREE // (SHARE_OF_FREE + 1))
        self.sequences = 0
        self.tokens = 0
        self._shares_of_sequences, self._shares_of_tokens = Shares(), Shares()

    @contextmanager
    def hold(self, request: GenerationRequest | OpenAIRequest, key: str | None = None) -> Iterator[None]:
        """While it runs. key: the name of the one that it came with. A request counts for so many tokens at most that
        it gets in when nobody else is there, and leaves room for others. Raises BackPressureError, as Serve does for a
        full queue, KeyShareTaken, and RequestError for more answers than there is ever room for."""
        sequences = request.num_answers
        tokens = min(tokens_in_flight(request), self._most_of_one)
        if sequences > self._max_sequences:
            raise RequestError(
                "sampling.n" if isinstance(request, GenerationRequest) else "n",
                f"asks for {sequences} answers at once, prompts times n, and there is room for {self._max_sequences}",
                f"ask for at most {self._max_sequences}",
            )
        free_sequences, free_tokens = self._max_sequences - self.sequences, self._max_tokens - self.tokens
        if sequences > free_sequences or tokens > free_tokens:
            raise BackPressureError(num_queued_requests=self.sequences, max_queued_requests=self._max_sequences)
        parts = (
            (self._shares_of_sequences, sequences, free_sequences),
            (self._shares_of_tokens, tokens, free_tokens),
        )
        if not all(shares.allow(key, more, free) for shares, more, free in parts):
            raise KeyShareTaken(request.request_id)
        self.sequences += sequences
        self.tokens += tokens
        for shares, more, _ in parts:
            shares.take(key, more)
        try:
            yield
        finally:
            self.sequences -= sequences
            self.tokens -= tokens
            for shares, more, _ in parts:
                shares.give_back(key, more)
