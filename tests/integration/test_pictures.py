"""Chats with pictures: answers are plain vLLM's, whatever drafts; hosts that are not allowed are not reached; a wrong
picture is refused and the engine goes on."""

import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from importlib.util import find_spec

import httpx
import pytest
from transformers import LlavaConfig

from outrider.actors.vllm_adapter.engine_args import target_vllm_config
from outrider.cluster.config import ConfigError, parse_config
from outrider.cluster.placement import RankPlacement
from tests.support.cluster.scrape import parse
from tests.support.cluster.serving import HANG_GUARD_S, wait_until
from tests.support.models.plain_engine import greedy_answers
from tests.support.models.tiny_pictures import IMAGE_TOKEN_ID, NUM_PICTURE_TOKENS, data_url, picture, png_header

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

NUM_TOKENS = 48
RED, BLUE = data_url(picture(1)), data_url(picture(2, 200, 90, "JPEG"), "jpeg")
TEXT = "What is this?"
LONG = "It was the best of times, it was the worst of times. " * 8


def said(*parts, text=TEXT):
    """Return one message: a text, and pictures by their URLs."""
    shown = [{"type": "image_url", "image_url": {"url": url}} for url in parts]
    return [{"role": "user", "content": [{"type": "text", "text": text}, *shown]}]


def after(length, *parts):
    """Pictures that begin behind so many characters, some of them where a step's share of the prompt ends."""
    return [{"role": "system", "content": "x" * length}, *said(*parts)]


CHATS = [said(RED), said(BLUE), said(RED, BLUE), said(RED, text=LONG), said(), after(50, BLUE), after(75, RED, BLUE)]
GREEDY = {"temperature": 0}
SEEDED = {"temperature": 0.8, "top_p": 0.95, "seed": 5}


def post(deployment, body, path="/v1/chat/completions"):
    return httpx.post(f"{deployment.http_url}{path}", json=body, timeout=HANG_GUARD_S)


def ask(deployment, messages, **options):
    body = {"messages": messages, "max_tokens": NUM_TOKENS, "ignore_eos": True, "return_token_ids": True, **options}
    answer = post(deployment, body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def ask_all(deployment, chats=CHATS, **options):
    """At once."""
    with ThreadPoolExecutor(len(chats)) as threads:
        return list(threads.map(lambda messages: ask(deployment, messages, **options), chats))


def tokens(answer):
    return answer["choices"][0]["token_ids"]


def num_drafts(answer):
    return answer["metrics"]["speculative_decoding"]["num_draft_tokens"]


def count(deployment, metric):
    text = httpx.get(f"{deployment.http_url}/metrics", timeout=HANG_GUARD_S).text
    return sum(value for _, value in parse(text, 0.0).of(metric))


OFF = {"speculation": {"enabled": False}}


def plain_answers(model, num_picture_tokens):
    """Return plain vLLM's token ids of the prompt and the greedy answer of each chat."""
    found = greedy_answers(model, CHATS, NUM_TOKENS)
    assert [prompt.count(IMAGE_TOKEN_ID) for prompt, _ in found] == num_picture_tokens
    assert len({tuple(answer) for _, answer in found}) == len(CHATS)
    return found


def check(answers, plain):
    for answer, (prompt, expected) in zip(answers, plain, strict=True):
        assert answer["prompt_token_ids"] == prompt
        assert tokens(answer) == expected


def test_greedy_answers_are_plain_vllm_s(pictures):
    plain = plain_answers(pictures.models.sees, [NUM_PICTURE_TOKENS * number for number in (1, 1, 2, 1, 0, 1, 2)])
    check(ask_all(pictures, **GREEDY), plain)
    check(ask_all(pictures, **GREEDY, **OFF), plain)


def test_with_positions_in_three_dimensions_two_ranks_and_a_suffix_drafter(pictures_mrope):
    red, blue = 16, 55
    plain = plain_answers(pictures_mrope.models.sees_by_mrope, [red, blue, red + blue, red, 0, blue, red + blue])
    for _ in range(2):  # the second time from what is remembered of the first
        check(answers := ask_all(pictures_mrope, **GREEDY), plain)
    assert sum(map(num_drafts, answers)) > 0
    alone = ask_all(pictures_mrope, **SEEDED, **OFF, max_tokens=200)
    assert list(map(tokens, ask_all(pictures_mrope, **SEEDED, max_tokens=200))) == list(map(tokens, alone))
    assert count(pictures_mrope, "vllm:num_preemptions_total") > 0


@pytest.mark.parametrize("choice", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_with_drafts_without_and_with_a_drafter_that_is_killed(pictures, choice):
    epoch = pictures.linked().epoch
    alone = ask_all(pictures, **choice, **OFF)
    assert sum(map(num_drafts, alone)) == 0

    def drafted():
        answers = ask_all(pictures, **choice)
        assert list(map(tokens, answers)) == list(map(tokens, alone))
        return min(map(num_drafts, answers)) > 0

    wait_until(drafted, HANG_GUARD_S, "answers with drafts")
    long = ask_all(pictures, **choice, **OFF, max_tokens=300)
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(ask_all, pictures, **choice, max_tokens=300)
        wait_until(lambda: pictures.status().target.running > 2, HANG_GUARD_S, "several running")
        pictures.signal_drafter(signal.SIGKILL)
        assert list(map(tokens, running.result())) == list(map(tokens, long))
    pictures.linked(epoch_after=epoch)
    assert count(pictures, "vllm:num_preemptions_total") > 0


def test_two_pictures_share_no_cache_and_one_finds_its_own(pictures):
    """Their prompts' ids are the same."""

    def cached(url):
        body = {"messages": said(url, text="x" * 400), "max_tokens": 2, **GREEDY}
        return post(pictures, body).json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    first, second = data_url(picture(11)), data_url(picture(12))
    assert [cached(url) for url in (first, second)] == [0, 0]
    assert all(cached(url) > 0 for url in (first, second))


def refused(deployment, messages, status=HTTPStatus.BAD_REQUEST, path="/v1/chat/completions"):
    """Returns what vLLM says; the engine goes on."""
    answer = post(deployment, {"messages": messages, "max_tokens": 2}, path)
    assert answer.status_code == status, answer.text
    assert len(tokens(ask(deployment, said(), max_tokens=2))) == 2
    return answer.json()["error"]["message"]


FORBIDDEN = "must be from one of the allowed domains"
WRONG = {  # what is 500 here is an error that vLLM has no status for
    "a decompression bomb": (data_url(png_header(40_000, 40_000)), "bomb", HTTPStatus.INTERNAL_SERVER_ERROR),
    "a torn picture": (data_url(picture(1)[:80]), "Failed to load image", HTTPStatus.BAD_REQUEST),
    "a file": ("file:///etc/passwd", "Cannot load local files", HTTPStatus.INTERNAL_SERVER_ERROR),
    "a forbidden host": ("http://pictures.example.com/a.png", FORBIDDEN, HTTPStatus.BAD_REQUEST),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_picture_is_refused(pictures, name):
    url, problem, status = WRONG[name]
    assert problem in refused(pictures, said(url), status)


@pytest.mark.exhaustive  # vLLM looks at three checkpoints
def test_targets_that_cannot_are_refused_at_the_start(models, tmp_path):
    def start(model):
        target = {"model": str(model), "engine_args": {"limit_mm_per_prompt": {"image": 1}}}
        ranks = RankPlacement("local", ["Verifier:test"], [0], None, {})
        return target_vllm_config(parse_config({"target": target}), ranks, None)

    start(models.sees)
    start(models.sees_by_mrope)
    with pytest.raises(ConfigError, match=r"limit_mm_per_prompt: target.model \(LlamaForCausalLM\) takes text alone"):
        start(models.target)
    if find_spec("torchvision") is None:
        LlavaConfig(architectures=["LlavaForConditionalGeneration"]).save_pretrained(tmp_path)
        with pytest.raises(ConfigError, match=r"^target: .*needs torchvision, which is not installed"):
            start(tmp_path)


@pytest.fixture
def listener():
    """On 127.0.0.1 and ::1: its port, and who connected."""
    seen = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        server.settimeout(0.1)
        stop = threading.Event()

        def accept():
            while not stop.is_set():
                try:
                    connection, address = server.accept()
                except TimeoutError:
                    continue
                seen.append(address)
                connection.close()

        thread = threading.Thread(target=accept)
        thread.start()
        yield port, seen
        stop.set()
        thread.join()


def test_no_host_is_reached_that_is_not_allowed(pictures, listener):
    port, seen = listener
    hosts = ["127.0.0.1", "[::1]", "169.254.169.254", "10.0.0.1", "0.0.0.0", "2130706433", "127.1", "0x7f.1"]
    for url in (
        *(f"http://{host}:{port}/a.png" for host in hosts),
        f"http://localhost@127.0.0.1:{port}/a.png",
        f"http://127.0.0.1:{port}\\@localhost/a.png",
    ):
        answer = post(pictures, {"messages": said(url), "max_tokens": 2})
        assert answer.status_code in (400, 422), (url, answer.text)
    assert seen == []
    with socket.create_connection(("127.0.0.1", port)):
        wait_until(lambda: seen, HANG_GUARD_S, "a connection of the test's own")
