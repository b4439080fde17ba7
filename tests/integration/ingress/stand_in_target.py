"""A target that does what its prompt says and meets the test in files of one directory, so that no extra Ray call takes
one of its slots."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ray import serve

from outrider.actors.replica_calls import (
    GenerationRequest,
    ModelInfo,
    ReplicaReply,
    RequestTiming,
    RoundOutput,
    SpeculativeDecodingMetrics,
    TokenizeRequest,
    TokenLogprob,
    TokenLogprobs,
    Tokens,
    Usage,
)
from outrider.cluster.config import parse_config

HANG_GUARD_S = 180.0
K, VOCAB_SIZE = 4, 100
TARGET_SLOTS, TARGET_QUEUE = 4, 2
CONFIG = parse_config(
    {
        "target": {"model": "pair"},
        "drafter": {"method": "ngram"},
        "speculation": {"num_speculative_tokens": K},
        "serving": {"num_replicas": 2},
    },
    "test",
)
"""The ingress's: a request whose replica is lost is sent once more."""


def stand_in_target(meeting_point: str) -> serve.Application:
    """Defined in here so that it travels by value: the replica cannot import this module."""

    @serve.deployment(name="Target", max_ongoing_requests=TARGET_SLOTS, max_queued_requests=TARGET_QUEUE)
    class StandInTarget:
        def __init__(self) -> None:
            self._at = Path(meeting_point)

        async def generate(self, request: GenerationRequest) -> AsyncIterator[RoundOutput]:
            script = request.prompt_text
            if script == "miss the deadline":
                raise TimeoutError
            if script == "die":
                os._exit(1)
            if script == "two":
                own = TokenLogprobs(1, -0.5, 2, (TokenLogprob(9, -0.25), TokenLogprob(1, -0.5)))
                yield RoundOutput("a", (1,), index=1, logprobs=(own,), prompt_logprobs=(None, own))
                yield RoundOutput("b", (2,), index=0)
                counted = SpeculativeDecodingMetrics(1, 4, 1)
                last = RoundOutput("c", (3, 4), "stop", "END", Usage(5, 2, 1), counted, index=0, logprobs=(own, own))
                yield last
                if script_ends := request.sampling.get("max_tokens"):
                    yield {1: last, 2: replace(last, index=2)}.get(script_ends, last)
                yield RoundOutput("d", (), "length", usage=Usage(5, 1, 1), index=1)
                return
            if script == "new reason":
                yield RoundOutput("one", (1,), "repetition", usage=Usage(5, 1))
                return
            yield RoundOutput("one ", (1,))
            if script == "hang":
                try:
                    (self._at / f"{request.request_id}.started").touch()
                    await asyncio.sleep(HANG_GUARD_S * 3)
                except asyncio.CancelledError:
                    (self._at / f"{request.request_id}.cancelled").touch()
                    raise
            if script == "explode later":
                raise ValueError("a secret of the inside")
            if script == "end early":
                return
            if script == "wait":
                while not (self._at / f"{request.request_id}.go").exists():  # noqa: ASYNC110 - made by another process
                    await asyncio.sleep(0.01)
            yield RoundOutput("", (2, 3))
            yield RoundOutput(
                "three",
                (4,),
                finish_reason="stop",
                stop_reason="END",
                usage=Usage(prompt_tokens=5, completion_tokens=4, cached_tokens=2),
                speculative_decoding=SpeculativeDecodingMetrics(2, 8, 1, 1.5, 0.125, (1, 1, 0, 0, 0)),
                timing=RequestTiming(0.5, 0.25, 2.0, 3.0),
            )

        async def tokenize(self, request: TokenizeRequest) -> Tokens:
            return Tokens(tuple((request.text or "").encode()), 256, ("a",) if request.return_token_strs else ())

        async def model_info(self) -> ModelInfo:
            return ModelInfo(
                256, VOCAB_SIZE, "float32", "Llama", "Fast", False, (2,), ("coupled",), "coupled", ("ngram",), K
            )

        async def signed_reply(self, method: str, args: tuple[Any, ...]) -> ReplicaReply:
            if method == "check_health":
                broken = (self._at / "broken").exists()
                return ReplicaReply("one", error="RuntimeError: the engine is dead" if broken else None)
            (self._at / f"{args[1]}.asked").touch()
            return ReplicaReply("one", value=False)

    return StandInTarget.bind()
