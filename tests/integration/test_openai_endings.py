"""How requests over OpenAI's API end early: a closed stream, a client's timeout, a deadline, an abort over gRPC."""

import openai
import pytest

from tests.integration.openai_calls import chat, complete
from tests.serving import ended_early

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

TO_GO = 900
"""Tokens that every request here asks for."""


@pytest.fixture(autouse=True)
def freed(pair):
    with ended_early(pair, TO_GO):
        yield


@pytest.fixture
def client(pair):
    with openai.OpenAI(base_url=f"{pair.http_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_stream_that_is_closed_is_aborted(client, pair):
    stream = complete(client, temperature=0, max_tokens=TO_GO, stream=True)
    for _ in range(3):
        next(stream)
    assert pair.status().target.running == 1
    stream.close()


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_a_client_that_gives_up_waiting_is_aborted(client, pair, endpoint):
    with pytest.raises(openai.APITimeoutError):
        (chat if endpoint == "chat" else complete)(client, temperature=0, max_tokens=TO_GO, timeout=0.25)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_the_deadline_is_kept(client, pair, stream):
    headers = {"x-request-timeout-ms": "250"}
    if stream:
        with pytest.raises(openai.APIError, match="deadline"):
            list(complete(client, temperature=0, max_tokens=TO_GO, stream=True, extra_headers=headers))
    else:
        with pytest.raises(openai.APIStatusError, match="deadline") as caught:
            complete(client, temperature=0, max_tokens=TO_GO, extra_headers=headers)
        assert caught.value.status_code == 408


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize("known_by", ["header", "answer"])
def test_a_request_is_aborted_over_grpc(client, pair, endpoint, known_by):
    name = f"r-abort-{endpoint}-{known_by}"
    ask = chat if endpoint == "chat" else complete
    events = iter(ask(client, temperature=0, max_tokens=TO_GO, stream=True, extra_headers={"x-request-id": name}))
    first = next(events)
    assert name in first.id
    assert pair.client.abort(name if known_by == "header" else first.id)
    *_, last = events
    assert last.choices[0].finish_reason == "abort"
