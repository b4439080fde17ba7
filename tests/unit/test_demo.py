"""What ``make demo`` prints of its answers."""

from __future__ import annotations

import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from outrider.deploy.client.sync_client import OutriderClient
from outrider.deploy.demo import (
    PAIRS,
    PROMPT,
    Answer,
    DemoError,
    Wrapped,
    comparison,
    next_commands,
    pieces,
    round_summary,
    same_tokens,
    show,
)
from outrider.deploy.progress import Progress
from outrider.v1 import generation_pb2 as pb
from outrider.v1 import generation_pb2_grpc as rpc

ACCEPTED, RECOVERED, BONUS = pb.TOKEN_ORIGIN_ACCEPTED, pb.TOKEN_ORIGIN_RECOVERED, pb.TOKEN_ORIGIN_BONUS
TEXTS = {1: "The", 2: " fox", 3: " ran", 4: "\u00e9", 9: "<end>"}
GREEN = "\033[32m"


def message(ids: list[int], origins: list[int], text: str) -> pb.GenerateStreamResponse:
    return pb.GenerateStreamResponse(token_ids=ids, origins=origins, text_delta=text)


@pytest.mark.parametrize(
    ("ids", "origins", "text", "expected"),
    [
        ([1, 2, 3], [ACCEPTED, ACCEPTED, BONUS], "The fox ran", [("The", True), (" fox", True), (" ran", False)]),
        ([1, 9], [ACCEPTED, RECOVERED], "The", [("The", True)]),  # an end token shows no text
        ([1, 4], [ACCEPTED, BONUS], "The", [("The", True)]),  # a character that is still incomplete
        ([1, 2], [ACCEPTED, BONUS], "Tho fox", [("Tho fox", False)]),
        ([1, 2], [], "The fox", [("The fox", False)]),  # a server that does not tell
        ([], [], "", [("", False)]),
    ],
)
def test_pieces_of_a_message_by_origin(ids, origins, text, expected) -> None:
    assert pieces(message(ids, origins, text), TEXTS.__getitem__) == expected


def wrapped(parts: list[tuple[str, str]], width: int, colour: bool) -> str:
    out = io.StringIO()
    text = Wrapped(out, width, colour)
    for part, style in parts:
        text.write(part, style)
    text.end()
    return out.getvalue()


def test_lines_break_between_words_wherever_the_pieces_do() -> None:
    parts = [("The quick br", ""), ("own f", ""), ("ox jum", ""), ("ps.\n\n  Two", ""), (" lines", "")]
    assert wrapped(parts, 12, colour=False) == "The quick\nbrown fox\njumps.\n\n  Two lines\n"


def test_colours_begin_and_end_within_a_word_and_leave_no_trace_without_colour() -> None:
    parts = [("ab", ""), ("cd", GREEN), (" ef", "")]
    assert wrapped(parts, 40, colour=True) == f"ab\033[0m{GREEN}cd\033[0m ef\n"
    assert wrapped(parts, 40, colour=False) == "abcd ef\n"


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
    assert "NOT the same: they differ from token 3 on" in text
    assert same_tokens([answer([1, 2], 1.0, 1)], [answer([1, 2, 3], 1.0, 1)]).endswith("from token 3 on")


def test_everything_fits_a_hundred_columns() -> None:
    text = next_commands() + "\n" + comparison([answer([1], 9.0, 1)], [answer([1], 9.0, 1)], [answer([1], 10.0, 1)])
    assert max(map(len, text.splitlines())) <= 100
    assert text.count("outrider ") == 3


def test_a_draft_step_is_what_the_drafter_says_of_it_however_seldom_anybody_waits_for_one() -> None:
    median = pb.RoundTime(period_ms=87.0, target_ms=85.6, draft_ms=0.0, samples=512)
    status = pb.GetServerStatusResponse(rounds=pb.RoundStatistics(median=median, draft_step_ms=19.26))
    assert "A draft step takes 19.26 ms" in round_summary(status)


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

    def Detokenize(self, request, context) -> pb.DetokenizeResponse:
        return pb.DetokenizeResponse(text="".join(TEXTS[token_id] for token_id in request.token_ids))


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
    assert "\033" not in text  # not a terminal
    assert "the same ones, each time" in text
    assert text.split("tokens a round")[1].split()[:2] == ["1.50", "1.00"]
    asked = [not request.speculation.HasField("enabled") for request in service.requests]
    assert asked == [True, False] + [True, False] * PAIRS  # the first of each warms up
    assert all(request.sampling.temperature == 0.0 for request in service.requests)
    assert {request.chat.messages[0].content for request in service.requests} == {PROMPT}


def test_an_empty_answer_is_an_error() -> None:
    with pytest.raises(DemoError, match="empty"):
        shown(Fox(answers=False))
