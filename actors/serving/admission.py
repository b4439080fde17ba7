"""How much an ingress takes on: the answers and tokens that all of its requests together may come to.

Requests are counted where they are queued (see outrider.actors.serving.gate, and Serve's own max_queued_requests); but
one request may ask for 64 answers, or for a prompt as long as the model takes, and hold a place like any other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ray.serve.exceptions import BackPressureError

from outrider.actors.replica_calls import GenerationRequest, OpenAIRequest
from outrider.cluster.limits import LimitsConfig

USUAL_ANSWER_TOKENS = 1024
"""Counted for an answer whose length is not limited: hardly one is as long as the model could make it."""


class Admission:
    """Of one ingress, for its event loop."""

    def __init__(self, limits: LimitsConfig) -> None:
        self._limits = limits
        self.sequences = 0
        self.tokens = 0

    @contextmanager
    def hold(self, request: GenerationRequest | OpenAIRequest) -> Iterator[None]:
        """While it runs. A request that is alone is let in however large it is: it would never be otherwise. Raises
        BackPressureError, as Serve does for a full queue."""
        sequences = request.num_answers
        tokens = request.prompt_tokens + sequences * (request.max_tokens or USUAL_ANSWER_TOKENS)
        most = self._limits
        too_many = self.sequences + sequences > most.max_sequences or self.tokens + tokens > most.max_tokens_in_flight
        if self.sequences and too_many:
            raise BackPressureError(num_queued_requests=self.sequences, max_queued_requests=most.max_sequences)
        self.sequences += sequences
        self.tokens += tokens
        try:
            yield
        finally:
            self.sequences -= sequences
            self.tokens -= tokens
