"""Clients ask one call after the other, over gRPC and over HTTP, and again what failed.

violations() finds what may not be: a wrong token, an end without a status, a call lost for nothing or never answered.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import grpc
import httpx
import torch
from torch import Tensor

from outrider.deploy.client.sync_client import OutriderError
from tests.support.cluster.serving import HANG_GUARD_S, Deployment, wait_until
from tests.support.models.distribution import cut_to_top, z_score
from tests.support.models.reference import GREEDY, Choice, Coupled, Reference

TOP_K = 4
"""The top_k of calls whose tokens are drawn."""

ANSWERED_WITHIN_S = 300.0
"""Seconds after the first attempt: a target that loads anew on shared cores may be waited for."""

PAUSE_S = 0.2
"""Seconds before what failed is asked again."""


@dataclass(frozen=True)
class Kind:
    """Options of a call. choice: gives the answer's tokens; None: they are drawn, of the likeliest."""

    name: str
    options: dict[str, Any]
    choice: Choice | None = None


KINDS = (
    Kind("greedy", GREEDY.options(), GREEDY),
    Kind("coupled", Coupled(seed=31).options(), Coupled(seed=31)),
    Kind("coupled, top_p", Coupled(32, 0.7, 0.95).options(), Coupled(32, 0.7, 0.95)),
    Kind("rejection", {"temperature": 1.0, "top_k": TOP_K, "verification": "rejection"}),
    Kind("coupled, without a seed", {"temperature": 1.0, "top_k": TOP_K, "verification": "coupled"}),
    Kind("block", {"temperature": 1.0, "top_k": TOP_K, "verification": "block"}),
)


@dataclass(frozen=True)
class Failure:
    """An error of a call. has_status: the server sent one; else the connection ended."""

    code: grpc.StatusCode
    said: str
    has_status: bool = True


@dataclass
class Attempt:
    started: float
    tokens: list[int] = field(default_factory=list)
    ended: float = 0.0
    error: Failure | None = None


@dataclass
class Call:
    kind: Kind
    prompt: list[int]
    max_tokens: int
    leaves_after: int | None = None
    """Messages after which the client goes; None: it stays."""

    http: bool = False
    attempts: list[Attempt] = field(default_factory=list)
    answered: bool = False

    def __str__(self) -> str:
        api = "HTTP" if self.http else "gRPC"
        return f"{self.kind.name} over {api}, {len(self.prompt)} + {self.max_tokens} tokens"


class _Failed(Exception):
    """Over HTTP."""


class Clients:
    """Each asks one call after the other, and again what failed with one of the codes `again`, until told to stop.

    Args:
        lengths: of answers, in tokens.
        leave: the share of calls whose client goes away in the middle.
        http_every: of so many clients one speaks HTTP, the others gRPC.
    """

    def __init__(
        self,
        deployment: Deployment,
        number: int,
        seed: int,
        *,
        kinds: Sequence[Kind] = KINDS,
        lengths: Sequence[int] = (24, 96, 200),
        leave: float = 0.1,
        again: Container[grpc.StatusCode] = (grpc.StatusCode.UNAVAILABLE,),
        http_every: int = 3,
    ) -> None:
        self._deployment = deployment
        self._kinds, self._lengths, self._leave, self._again = kinds, lengths, leave, again
        self._stopping = threading.Event()
        self.calls: list[Call] = []
        self.crashed: list[BaseException] = []
        self._ended = 0
        """Calls. Counted without a lock: one that is not counted is waited for a little longer."""

        self._threads = [
            threading.Thread(target=self._run, args=(random.Random(f"{seed}-{n}"), n % http_every == 1), daemon=True)
            for n in range(number)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def wait_for_answers(self, more_each: int = 1) -> None:
        """Wait until each client has so many more calls behind it."""
        wanted = self._ended + more_each * len(self._threads)
        wait_until(lambda: self.crashed or self._ended >= wanted, ANSWERED_WITHIN_S, "more answers")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: object) -> None:
        ended = self.stop()
        assert error is not None or (ended and not self.crashed), f"a call never ended, or crashed: {self.crashed}"

    def stop(self) -> bool:
        """Ask no more calls, and wait for those that run. Returns whether all came to an end."""
        self._stopping.set()
        give_up = time.monotonic() + ANSWERED_WITHIN_S + HANG_GUARD_S
        for thread in self._threads:
            thread.join(max(0.0, give_up - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self, choose: random.Random, http: bool) -> None:
        try:
            with httpx.Client(base_url=self._deployment.http_url, timeout=HANG_GUARD_S) as client:
                while not self._stopping.is_set():
                    number = choose.randrange(24)
                    prompt = [(number * 11 + position * 5) % 250 for position in range(8 + 9 * (number % 8))]
                    leaves = choose.randrange(1, 6) if choose.random() < self._leave else None
                    call = Call(choose.choice(self._kinds), prompt, choose.choice(self._lengths), leaves, http)
                    self.calls.append(call)
                    self._ask_until_answered(call, client)
                    self._ended += 1
        except BaseException as error:
            self.crashed.append(error)
            raise

    def _ask_until_answered(self, call: Call, client: httpx.Client) -> None:
        give_up = time.monotonic() + ANSWERED_WITHIN_S
        while not call.answered and time.monotonic() < give_up:
            attempt = Attempt(time.monotonic())
            call.attempts.append(attempt)
            try:
                for number, tokens in enumerate(
                    self._over_http(call, client) if call.http else self._over_grpc(call), 1
                ):
                    attempt.tokens += tokens
                    if number == call.leaves_after:
                        break
                call.answered = True
            except OutriderError as error:
                if error.code is grpc.StatusCode.CANCELLED and "RST_STREAM" in str(error):
                    # HAProxy resets the streams of a Serve proxy that is lost.
                    attempt.error = Failure(grpc.StatusCode.UNAVAILABLE, str(error), has_status=False)
                else:
                    attempt.error = Failure(error.code, str(error))
            except _Failed as error:
                status, said = error.args
                code = {
                    502: grpc.StatusCode.UNAVAILABLE,
                    503: grpc.StatusCode.UNAVAILABLE,
                    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
                }.get(status)
                attempt.error = Failure(code or grpc.StatusCode.UNKNOWN, f"{status}: {said}")
            except httpx.TransportError as error:
                attempt.error = Failure(grpc.StatusCode.UNAVAILABLE, repr(error), has_status=False)
            attempt.ended = time.monotonic()
            if attempt.error is not None:
                if attempt.error.code not in self._again:
                    return
                time.sleep(PAUSE_S)

    def _over_grpc(self, call: Call) -> Iterator[Sequence[int]]:
        options = {"max_tokens": call.max_tokens, "ignore_eos": True, "timeout_s": HANG_GUARD_S}
        with self._deployment.client.stream(call.prompt, **options, **call.kind.options) as stream:
            for message in stream:
                yield message.token_ids

    def _over_http(self, call: Call, client: httpx.Client) -> Iterator[Sequence[int]]:
        """Raises _Failed with the status and what was said, at the start or in mid-stream."""
        sampling = dict(call.kind.options)
        if (verification := sampling.pop("verification", None)) is not None:
            sampling["speculation"] = {"verification": verification}
        options = {"max_tokens": call.max_tokens, "ignore_eos": True, "return_token_ids": True, "stream": True}
        body = {"model": self._deployment.config.served_model_name, "prompt": call.prompt, **options, **sampling}
        with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                raise _Failed(response.status_code, response.read().decode())
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    return
                if not line.startswith("data: "):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if (error := event.get("error")) is not None:
                    raise _Failed(error["code"], error["message"])
                if event["choices"]:
                    yield event["choices"][0].get("token_ids") or []
        raise _Failed(0, "the stream ended without [DONE]")


@dataclass(frozen=True)
class Excuse:
    """From when until when a call may have been cut, by the monotonic clock. without_status: the process that would say
    so may have been lost."""

    since: float
    until: float
    without_status: bool = False


DRAWN = tuple(kind for kind in KINDS if kind.choice is None)


def violations(
    deployment: Deployment, calls: Sequence[Call], excuse: Excuse | None, *, may_be_refused: bool = False
) -> list[str]:
    """Return what should not have happened, in words. may_be_refused: for want of room."""
    found = []
    for call in calls:
        for attempt in call.attempts:
            found += [f"{call}: {problem}" for problem in _wrong_tokens(deployment, call, attempt)]
            error = attempt.error
            if error is None or (may_be_refused and error.code is grpc.StatusCode.RESOURCE_EXHAUSTED):
                continue
            if error.code is not grpc.StatusCode.UNAVAILABLE:
                found.append(f"{call}: ended with {error.said}")
            if excuse is None or attempt.ended < excuse.since or attempt.started > excuse.until:
                found.append(f"{call}: cut although nothing that it ran on was lost: {error.said}")
            elif not (error.has_status or excuse.without_status):
                found.append(f"{call}: ended without a status: {error.said}")
        if not call.answered:
            found.append(f"{call}: not answered after {len(call.attempts)} attempts: {call.attempts[-1].error}")
        elif call.leaves_after is None and len(call.attempts[-1].tokens) != call.max_tokens:
            found.append(f"{call}: {len(call.attempts[-1].tokens)} tokens came")
    return found


def _wrong_tokens(deployment: Deployment, call: Call, attempt: Attempt) -> list[str]:
    if not attempt.tokens:
        return []
    if call.kind.choice is None:
        outside = deployment.reference.outside_top(call.prompt, attempt.tokens, TOP_K)
        return [f"tokens {outside} are none of the {TOP_K} likeliest"] if outside else []
    try:
        deployment.reference.check(call.prompt, attempt.tokens, label=call.kind.name, choice=call.kind.choice)
    except AssertionError as error:
        return [str(error)]
    return []


def drawn(deployment: Deployment, calls: Sequence[Call], kind: Kind) -> tuple[int, float]:
    """(How many tokens were drawn for calls of that kind, by how many standard deviations their places among the
    likeliest are off the target's own.) Where a client goes may depend on what it was told, so those do not count."""
    texts = [
        (call.prompt, attempt.tokens)
        for call in calls
        if call.kind is kind and call.leaves_after is None
        for attempt in call.attempts
        if attempt.tokens
    ]
    tokens = torch.tensor([token for _, answer in texts for token in answer])

    def along(reference: Reference) -> Tensor:
        return torch.cat(
            [
                reference.logits_along(torch.tensor([[*prompt, *answer]]))[0, len(prompt) - 1 : -1]
                for prompt, answer in texts
            ]
        )

    p, q = cut_to_top(along(deployment.reference), TOP_K), along(deployment.drafter_reference)
    return len(tokens), z_score(tokens, p, q, TOP_K)


def summary(calls: Sequence[Call]) -> str:
    again = sum(len(call.attempts) - 1 for call in calls)
    errors = Counter(attempt.error.code.name for call in calls for attempt in call.attempts if attempt.error)
    tokens = sum(len(attempt.tokens) for call in calls for attempt in call.attempts)
    over_http = sum(call.http for call in calls)
    return f"{len(calls)} calls, {over_http} over HTTP, {tokens} tokens, {again} asked again ({dict(errors)})"
