"""The ingress explains requests that are wrong, and hides failures inside."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from outrider.deploy.client.sync_client import OutriderClient
from tests.integration.ingress.calls import failure

pytestmark = pytest.mark.timeout(600)


def test_a_request_no_token_can_be_chosen_for_says_so(client: OutriderClient) -> None:
    error = failure(lambda: list(client.stream("no token", request_id="r-nan")))
    assert error.code is grpc.StatusCode.INTERNAL
    assert error.message == "request r-nan: the model's logits for the next token were not finite"


@pytest.mark.parametrize(
    ("field", "prompt", "options"),
    [
        ("request_id", "go", {"request_id": "a b"}),
        ("text", "refuse", {}),
    ],
)
@pytest.mark.parametrize("way", ["unary", "stream"])
def test_bad_input_is_named_and_explained(
    client: OutriderClient, way: str, field: str, prompt: str | list[int], options: Any
) -> None:
    call = (
        (lambda: client.generate(prompt, **options))
        if way == "unary"
        else (lambda: list(client.stream(prompt, **options)))
    )
    error = failure(call)
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert error.message.startswith(f"{field}: ")
    assert "; " in error.message
    assert "\n" not in error.message


@pytest.mark.parametrize("script", ["explode", "explode later", "end early"])
@pytest.mark.parametrize("way", ["unary", "stream"])
def test_a_failure_inside_says_which_request_and_nothing_of_the_inside(
    client: OutriderClient, way: str, script: str
) -> None:
    if way == "unary":
        error = failure(lambda: client.generate(script, request_id="r-boom"))
    else:
        error = failure(lambda: list(client.stream(script, request_id="r-boom")))
    assert error.code is grpc.StatusCode.INTERNAL
    assert error.message == "request r-boom failed inside the server; its log says why"
