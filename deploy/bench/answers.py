"""What is asked and what came back: one Ask and one Answer a prompt, a Chunk of answers a turn. Pure.

Times are seconds, measured by whoever asked: the gRPC client on our side, the engine's own process on the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

SideName = Literal["ours", "other"]

QUIET_CORES = 0.25
"""CPU seconds a second of programs that are no part of the benchmark from which on a chunk counts as spoilt."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One prompt with its sampling parameters, the same for both sides."""

    index: int
    """Of the prompt in the dataset."""

    text: str
    max_tokens: int
    temperature: float
    seed: int | None
    """None at temperature 0, which draws nothing."""

    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """How one Ask was answered."""

    index: int
    arrivals: tuple[tuple[float, int], ...]
    """(seconds since the request was sent, tokens) of every message that carried tokens."""

    ended_s: float
    """Seconds from sending the request to the end of its stream."""

    token_ids: tuple[int, ...]
    drafted_rounds: int = 0
    """Rounds with at least one draft; this and the next two as the engine counted them for this request."""

    drafted: int = 0
    accepted: int = 0

    engine_decode_s: float | None = None
    """From the first token to the last, by the engine's clock; this and the next are None where it is not told."""

    engine_latency_s: float | None = None
    """From the request's arrival in the target replica to its end there."""

    @property
    def ttft_s(self) -> float | None:
        """None when no token came."""
        return self.arrivals[0][0] if self.arrivals else None

    def gaps(self) -> Iterator[tuple[float, int]]:
        """(seconds since the message before, tokens) of every message but the first."""
        for (before_s, _), (at_s, tokens) in zip(self.arrivals, self.arrivals[1:], strict=False):
            yield at_s - before_s, tokens

    @property
    def way_s(self) -> float | None:
        """What the request and the answer's end spent between the client and the engine, both ways together."""
        return None if self.engine_latency_s is None else self.ended_s - self.engine_latency_s

    @property
    def span_s(self) -> float:
        """From the first message to the last; 0 when there are no two."""
        return self.arrivals[-1][0] - self.arrivals[0][0] if self.arrivals else 0.0

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Answer:
        """From what ``dataclasses.asdict`` became on its way through JSON."""
        arrivals = tuple((float(at_s), int(tokens)) for at_s, tokens in data["arrivals"])
        return cls(**{**data, "arrivals": arrivals, "token_ids": tuple(data["token_ids"])})


@dataclass(frozen=True, slots=True)
class Chunk:
    """One side's turn."""

    side: SideName
    pair: int
    """Chunks of both sides with the same pair hold the same prompts, one right after the other. From 0."""

    seconds: float
    """From the first request sent to the last stream's end."""

    answers: tuple[Answer, ...]
    resting_cores: float | None = None
    """CPU seconds a second that the other engine used meanwhile; it should rest. None: there is none, or unknown."""

    foreign_cores: float | None = None
    """Likewise, what no part of the benchmark used on this machine. None: not known."""

    @property
    def tokens(self) -> int:
        return sum(len(answer.token_ids) for answer in self.answers)

    @property
    def tok_per_s(self) -> float:
        return self.tokens / self.seconds
