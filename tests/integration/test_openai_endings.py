"""How requests over OpenAI's API end early: a closed stream, a client's timeout, a deadline, an abort over gRPC."""

import openai
import pytest

from tests.integration.openai_calls import chat, complete
from tests.serving import wait_until_idle

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

AT_ONCE_S = 1.5
"""A second, and what asking takes."""


@pytest.fixture
def client(pair):
    with openai.OpenAI(base_url=f"{pair.http_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_stream_that_is_closed_is_aborted(client, pair):
    wait_until_idle(pair, 60)
    stream = complete(client, temperature=0, max_tokens=900, stream=True)
    for _ in range(3):
        next(stream)
    assert pair.status().target.running == 1
    stream.close()
    wait_until_idle(pair, AT_ONCE_S)


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_a_client_that_gives_up_waiting_is_aborted(client, pair, endpoint):
    wait_until_idle(pair, 60)
    with pytest.raises(openai.APITimeoutError):
        (chat if endpoint == "chat" else complete)(client, temperature=0, max_tokens=900, timeout=0.7)
    wait_until_idle(pair, AT_ONCE_S)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_the_deadline_is_kept(client, pair, stream):
    wait_until_idle(pair, 60)
    headers = {"x-request-timeout-ms": "500"}
    if stream:
        with pytest.raises(openai.APIError, match="deadline"):
            list(complete(client, temperature=0, max_tokens=900, stream=True, extra_headers=headers))
    else:
        with pytest.raises(openai.APIStatusError, match="deadline") as caught:
            complete(client, temperature=0, max_tokens=900, extra_headers=headers)
        assert caught.value.status_code == 408
    wait_until_idle(pair, AT_ONCE_S)


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize("known_by", ["header", "answer"])
def test_a_request_is_aborted_over_grpc(client, pair, endpoint, known_by):
    name = f"r-abort-{endpoint}-{known_by}"
    ask = chat if endpoint == "chat" else complete
    events = iter(ask(client, temperature=0, max_tokens=900, stream=True, extra_headers={"x-request-id": name}))
    first = next(events)
    assert name in first.id
    assert pair.client.abort(name if known_by == "header" else first.id)
    *_, last = events
    assert last.choices[0].finish_reason == "abort"
    wait_until_idle(pair, AT_ONCE_S)
