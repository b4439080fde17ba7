"""What ``make demo`` prints of its answers."""

from __future__ import annotations

import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from outrider.deploy.client.sync_client import OutriderClient
from outrider.deploy.demo import PAIRS, PROMPT, Answer, DemoError, comparison, show
from outrider.deploy.progress import Progress
from outrider.v1 import generation_pb2 as pb
from outrider.v1 import generation_pb2_grpc as rpc

ACCEPTED, BONUS = pb.TOKEN_ORIGIN_ACCEPTED, pb.TOKEN_ORIGIN_BONUS
TEXTS = {1: "The", 2: " fox", 3: " ran"}


def answer(ids: list[int], speed: float, rounds: int) -> Answer:
    return Answer(tuple(ids), speed, rounds)


def test_the_comparison_gives_medians_the_ratio_and_that_tokens_are_the_same() -> None:
    ids = list(range(12))
    drafted = [answer(ids, speed, 4) for speed in (10.0, 30.0, 28.0)]
    plain = [answer(ids, speed, 12) for speed in (14.0, 100.0, 13.0)]
    lines = comparison(drafted, drafted, plain).splitlines()
    assert lines[1].split() == ["tokens/s", "28.0", "14.0", "2.00", "times", "as", "fast"]
    assert lines[2].split() == ["tokens", "a", "round", "3.00", "1.00"]
    assert lines[3].split() == ["tokens", "12", "12", "the", "same", "ones,", "each", "time"]
    assert "medians of 3" in lines[4]


def test_a_slow_down_and_other_tokens_are_said() -> None:
    drafted, plain = [answer([1, 2, 3], 9.0, 1)], [answer([1, 2, 4], 10.0, 3)]
    text = comparison(drafted, drafted, plain)
    assert "0.90 times as fast: drafting costs more here than it saves" in text
    assert "NOT the same: 2 different answers" in text


class Fox(rpc.GenerationServiceServicer):
    """Answers "The fox ran": in one round with drafts, in three without."""

    def __init__(self, answers: bool = True) -> None:
        self.answers = answers
        self.requests: list[pb.GenerateStreamRequest] = []

    def GenerateStream(self, request, context) -> Iterator[pb.GenerateStreamResponse]:
        self.requests.append(request)
        drafting = not request.speculation.HasField("enabled") or request.speculation.enabled
        rounds = [([1], [BONUS]), ([2, 3], [ACCEPTED, BONUS])] if drafting else [([i], [BONUS]) for i in (1, 2, 3)]
        for ids, origins in rounds if self.answers else ():
            text = "".join(TEXTS[token_id] for token_id in ids)
            yield pb.GenerateStreamResponse(token_ids=ids, origins=origins, text_delta=text, num_rounds=1)


def shown(service: Fox) -> str:
    server = grpc.server(ThreadPoolExecutor(4))
    rpc.add_GenerationServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    out = io.StringIO()
    try:
        with OutriderClient(f"127.0.0.1:{port}") as client:
            show(client, Progress(io.StringIO()), out)
    finally:
        server.stop(None).wait()
    return out.getvalue()


def test_the_same_greedy_chat_is_asked_with_and_without_speculation_in_turns() -> None:
    service = Fox()
    text = shown(service)
    assert PROMPT.split()[0] in text
    assert "\nThe fox ran\n" in text
    assert "the same ones, each time" in text
    assert text.split("tokens a round")[1].split()[:2] == ["1.50", "1.00"]
    asked = [not request.speculation.HasField("enabled") for request in service.requests]
    assert asked == [True, False] + [True, False] * PAIRS  # the first of each warms up
    assert all(request.sampling.temperature == 0.0 for request in service.requests)
    assert {request.chat.messages[0].content for request in service.requests} == {PROMPT}


def test_an_empty_answer_is_an_error() -> None:
    with pytest.raises(DemoError, match="empty"):
        shown(Fox(answers=False))
