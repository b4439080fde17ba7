"""The gRPC API's streaming and status calls over HTTP, as the page makes them, on a real deployment."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from google.protobuf import json_format

from outrider.v1 import generation_pb2 as pb
from tests.support.cluster.serving import HANG_GUARD_S, Deployment

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

STREAM = "/outrider/v1/stream"
PROMPT = "Once upon a time there was a request that came in as JSON. "


@pytest.fixture
def http(pair: Deployment) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=pair.http_url, timeout=HANG_GUARD_S, trust_env=False) as client:
        yield client


def messages(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """Yield the messages of a stream that is being read, up to [DONE]."""
    lines = response.iter_lines()
    for line in lines:
        if line == "data: [DONE]":
            assert not list(filter(None, lines))
            return
        if line:
            yield json.loads(line.removeprefix("data: "))
    pytest.fail("the stream has no [DONE]")


def test_the_same_answer_as_over_grpc(pair: Deployment, http: httpx.Client) -> None:
    body = {"text": PROMPT, "sampling": {"temperature": 1.0, "seed": "11", "max_tokens": 96}}
    with http.stream("POST", STREAM, json=body) as response:
        assert response.status_code == 200
        came = [json_format.ParseDict(message, pb.GenerateStreamResponse()) for message in messages(response)]
    whole = pair.client.generate(PROMPT, temperature=1.0, seed=11, max_tokens=96)
    assert [token_id for message in came for token_id in message.token_ids] == list(whole.token_ids)
    assert "".join(message.text_delta for message in came) == whole.text
    assert came[-1].finish_reason == pb.FINISH_REASON_LENGTH
    assert came[-1].usage.completion_tokens == 96
    assert len(came) > 96 / 9, "one message a round, not one for all"
    counted = came[-1].metrics.speculative_decoding
    origins = [origin for message in came for origin in message.origins]
    assert len(origins) == 96
    accepted = origins.count(pb.TOKEN_ORIGIN_ACCEPTED)
    assert 0 < accepted <= counted.num_accepted_draft_tokens  # the limit may have cut accepted ones off


@pytest.mark.parametrize(
    ("body", "param", "named"),
    [
        ({"text": PROMPT * 100}, "prompt", "max_model_len"),
        ({"text": PROMPT, "smapling": {}}, "body", "smapling"),
    ],
)
def test_refusals_name_the_field(http: httpx.Client, body: dict[str, Any], param: str, named: str) -> None:
    response = http.post(STREAM, json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert named in error["message"]


def test_status_and_model(pair: Deployment, http: httpx.Client) -> None:
    status = json_format.ParseDict(http.get("/outrider/v1/status").json(), pb.GetServerStatusResponse())
    assert status.model == pair.config.served_model_name
    assert (status.speculation_up, status.link.state) == (True, pb.LINK_STATE_UP)
    model = json_format.ParseDict(http.get("/outrider/v1/model").json(), pb.GetModelInfoResponse())
    assert model.max_model_len == pair.config.target.max_model_len


def test_texts_of_tokens(http: httpx.Client) -> None:
    response = http.post("/outrider/v1/token_texts", json={"token_ids": [*b"Hi \n", 0xC3]})
    assert response.json() == {"texts": ["H", "i", " ", "\n", "\ufffd"]}
    refused = http.post("/outrider/v1/token_texts", json={"token_ids": [100000]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "token_ids")
