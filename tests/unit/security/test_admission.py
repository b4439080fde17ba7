"""What a request counts for: its answers and its tokens, on either API."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
from ray.serve.exceptions import BackPressureError

from outrider.actors.openai_calls import OpenAIRequest
from outrider.actors.replica_calls import ChatMessage, ChatPrompt, GenerationRequest, RequestError
from outrider.actors.request_costs import USUAL_ANSWER_TOKENS
from outrider.actors.serving.admission import Admission
from outrider.actors.serving.grpc.validation import ServedModel, to_generation_request
from outrider.actors.serving.openai.door import to_openai_request
from outrider.actors.serving.shared_poll import APART_S, SharedPoll
from outrider.cluster.config import ConfigError, parse_config
from outrider.cluster.limits import LIMITS_VARIABLE, LimitsConfig, from_environment
from outrider.v1 import generation_pb2 as pb
from tests.clock import Clock


def openai(endpoint: Any = "completions", **body: Any) -> OpenAIRequest:
    return OpenAIRequest(endpoint, "r", body)


@pytest.mark.parametrize(
    ("request_", "sequences", "tokens"),
    [
        (GenerationRequest("r", "x" * 400, sampling={"n": 64, "max_tokens": 10}), 64, 100 + 640),
        (GenerationRequest("r", prompt_token_ids=(1,) * 50), 1, 50 + USUAL_ANSWER_TOKENS),
        (GenerationRequest("r", prompt_chat=ChatPrompt((ChatMessage("user", "x" * 40),))), 1, 10 + USUAL_ANSWER_TOKENS),
        (openai(prompt="x" * 40, n=3, max_tokens=5), 3, 10 + 15),
        (openai(prompt=["x" * 40, "x" * 80], n=2, max_tokens=1), 4, 30 + 4),
        (openai(prompt=[1, 2, 3], max_tokens=1), 1, 3 + 1),
        (openai(prompt=[[1, 2, 3], [4]], max_tokens=1), 2, 4 + 2),
        (
            openai(
                "chat", messages=[{"content": "x" * 40}, {"content": [{"text": "x" * 40}]}], max_completion_tokens=7
            ),
            1,
            27,
        ),
    ],
)
def test_what_a_request_counts_for(request_: Any, sequences: int, tokens: int) -> None:
    admission = Admission(LimitsConfig())
    with admission.hold(request_):
        assert (admission.sequences, admission.tokens) == (sequences, tokens)
    assert (admission.sequences, admission.tokens) == (0, 0)


def test_three_hundred_and_twenty_requests_of_sixty_four_answers_do_not_get_in() -> None:
    admission = Admission(LimitsConfig())
    let_in = 0
    with ExitStack() as held:
        for _ in range(320):
            try:
                held.enter_context(admission.hold(GenerationRequest("r", "x", sampling={"n": 64, "max_tokens": 1})))
            except BackPressureError:
                continue
            let_in += 1
        assert admission.sequences == 1024
    assert let_in == 16


def test_tokens_count_too_and_one_alone_always_gets_in() -> None:
    admission = Admission(LimitsConfig(max_tokens_in_flight=1000, max_sequences=64))
    large = GenerationRequest("r", "x", sampling={"n": 64, "max_tokens": 5000})
    with admission.hold(large), pytest.raises(BackPressureError), admission.hold(large):
        pass
    small = GenerationRequest("r", "x", sampling={"max_tokens": 600})
    with admission.hold(small), pytest.raises(BackPressureError), admission.hold(small):
        pass


@pytest.mark.parametrize("key", [None, "large"])
def test_one_request_for_more_tokens_than_there_is_room_for_keeps_nobody_out(key: str | None) -> None:
    admission = Admission(LimitsConfig(max_tokens_in_flight=9000))
    small = GenerationRequest("r", "x", sampling={"max_tokens": 400})
    with admission.hold(GenerationRequest("r", "x", sampling={"n": 64, "max_tokens": 5000}), key):
        with admission.hold(small), admission.hold(small, "small"):
            pass
        with pytest.raises(BackPressureError), admission.hold(GenerationRequest("r", "x", sampling={"n": 2})):
            pass
    assert admission.tokens == 0


def test_more_answers_than_there_is_ever_room_for_are_refused_by_their_field() -> None:
    """Let in when nobody else is there, they would keep everybody else out."""
    admission = Admission(LimitsConfig(max_sequences=32))
    several = OpenAIRequest("completions", "r", {"prompt": ["a"] * 5, "n": 7})
    for request, field in ((GenerationRequest("r", "x", sampling={"n": 33}), "sampling.n"), (several, "n")):
        with pytest.raises(RequestError, match=r"room for 32.*at most 32") as refused, admission.hold(request):
            pass
        assert refused.value.field == field
    assert admission.sequences == 0


def test_several_ingresses_let_in_what_one_would() -> None:
    admission = Admission(LimitsConfig(max_tokens_in_flight=2000, max_sequences=8), num_ingresses=2)
    for sampling in ({"n": 4, "max_tokens": 1}, {"max_tokens": 700}):
        request = GenerationRequest("r", "x", sampling=sampling)
        with admission.hold(request), pytest.raises(BackPressureError), admission.hold(request):
            pass


def grpc_request(limits: LimitsConfig, **fields: Any) -> GenerationRequest:
    message = pb.GenerateRequest(text="x", **fields)
    return to_generation_request(message, ServedModel("m", 4, limits), request_id="r", clock=Clock(100.0))


def http_request(limits: LimitsConfig, headers: dict[str, str] | None = None, **body: Any) -> OpenAIRequest:
    return to_openai_request(
        "chat", body, headers or {}, num_speculative_tokens=4, request_id="r", limits=limits, clock=Clock(100.0)
    )


def test_a_request_without_a_deadline_has_the_deployments() -> None:
    limits = LimitsConfig(default_timeout_s=60, greatest_timeout_s=120)
    for request in (grpc_request(limits), http_request(limits)):
        assert request.seconds_left() == 60
    assert grpc_request(limits, timeout_ms=90_000).seconds_left() == 90
    assert http_request(limits, {"x-request-timeout-ms": "90000"}).seconds_left() == 90
    for refused in (
        lambda: grpc_request(limits, timeout_ms=120_001),
        lambda: http_request(limits, {"x-request-timeout-ms": "120001"}),
    ):
        with pytest.raises(RequestError, match="send 1 to 120000 milliseconds"):
            refused()


def test_max_tokens_has_a_default_and_a_greatest_value() -> None:
    limits = LimitsConfig(default_max_tokens=100, greatest_max_tokens=200)
    assert grpc_request(limits).max_tokens == http_request(limits).max_tokens == 100
    assert grpc_request(limits, sampling=pb.SamplingParameters(max_tokens=150)).max_tokens == 150
    assert http_request(limits, max_completion_tokens=150).body == {"max_completion_tokens": 150}
    assert grpc_request(LimitsConfig(greatest_max_tokens=200)).max_tokens == 200
    assert grpc_request(LimitsConfig()).max_tokens is None
    refusals: list[Callable[[], Any]] = [
        lambda: grpc_request(limits, sampling=pb.SamplingParameters(max_tokens=201)),
        lambda: http_request(limits, max_tokens=201),
        lambda: http_request(limits, max_completion_tokens=201),
    ]
    for refused in refusals:
        with pytest.raises(RequestError, match=r"max_(completion_)?tokens: 201 is above .*; send 1 to 200"):
            refused()


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"default_timeout_s": 100, "greatest_timeout_s": 10}, "default_timeout_s .100. is above greatest_timeout_s"),
        ({"default_max_tokens": 100, "greatest_max_tokens": 10}, "default_max_tokens .100. is above"),
        ({"max_streams": 1}, "limits.max_streams: unknown key"),
        ({"receive_timeout_s": 0}, "limits.receive_timeout_s"),
    ],
)
def test_limits_that_cannot_hold_are_refused_at_start_up(limits: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_config({"target": {"model": "m"}, "limits": limits})


def test_proxies_read_them_from_their_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LIMITS_VARIABLE, raising=False)
    assert from_environment() == LimitsConfig()
    limits = LimitsConfig(max_watch_streams=7, allowed_hosts=("a.example",))
    for name, value in limits.to_environment().items():
        monkeypatch.setenv(name, value)
    assert from_environment() == limits
    monkeypatch.setenv(LIMITS_VARIABLE, '{"max_watch_streams": 0}')
    with pytest.raises(ConfigError, match=LIMITS_VARIABLE):
        from_environment()


async def test_all_who_ask_at_once_share_one_poll_that_is_no_older_than_their_question() -> None:
    asked, clock, go = 0, Clock(100.0), asyncio.Event()

    async def ask() -> int:
        nonlocal asked
        asked += 1
        number = asked
        await go.wait()
        if number == 3:
            raise ConnectionError
        return number

    poll = SharedPoll(ask, clock)
    callers = [asyncio.create_task(poll()) for _ in range(400)]
    while not asked:  # noqa: ASYNC110 - the poll's own task
        await asyncio.sleep(0)
    callers[0].cancel()  # and nobody else
    later = [asyncio.create_task(poll()) for _ in range(400)]
    await asyncio.sleep(0)
    assert asked == 1, "the next question is put a moment later"
    go.set()
    assert set((await asyncio.gather(*callers, return_exceptions=True))[1:]) == {1}
    assert set(await asyncio.gather(*later)) == {2}
    clock.now += APART_S
    failed = await asyncio.gather(*(poll() for _ in range(2)), return_exceptions=True)
    assert [type(error) for error in failed] == [ConnectionError] * 2
    assert asked == 3
