"""A caller learns nothing of others: ``cached_tokens`` are its own; answers are no longer than the limits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from outrider.deploy.keys import new_secret
from tests.security.attackers import PROMPT, Caller
from tests.security.conftest import Victim
from tests.security.test_access import write_keys
from tests.support.cluster.serving import CHAT_TEMPLATE, Deployments, Models, engine

pytestmark = [pytest.mark.exhaustive, pytest.mark.engine, pytest.mark.timeout(600)]

SECRETS = {"alice": new_secret(), "bob": new_secret()}
BLOCK = 128


def by_grpc(caller: Caller, salt: str) -> int:
    fields = {"prompt": (PROMPT * 20)[: 3 * BLOCK + 1], "max_tokens": 1, "cache_salt": salt or None}
    return caller.generate(**fields).usage.cached_tokens


def by_completions(caller: Caller, salt: str) -> int:
    more = {"cache_salt": salt} if salt else {}
    answer = caller.complete(prompt=(PROMPT[::-1] * 20)[: 3 * BLOCK + 1], max_tokens=1, **more)
    details = answer.json()["usage"]["prompt_tokens_details"]  # vLLM leaves them out where nothing was cached
    return int(details["cached_tokens"]) if details else 0


def by_responses(caller: Caller, salt: str) -> int:
    body = {"input": "The very same beginning. " * 16, "max_output_tokens": 1, **({"cache_salt": salt} if salt else {})}
    answer = caller.http.post("/v1/responses", json=body)
    return int(answer.json()["usage"]["input_tokens_details"]["cached_tokens"])


@pytest.fixture
def victim(deployments: Deployments, models: Models) -> Iterator[Victim]:
    deployments.add(
        "tenants",
        {
            "target": engine(models.target),
            "drafter": {"method": "suffix"},
            "openai": {"chat_template": CHAT_TEMPLATE, "enable_prompt_tokens_details": True},
            "serving": {"tenant_isolation": True, "default_max_tokens": 20, "greatest_max_tokens": 30},
        },
    )
    victim = Victim(deployments.use("tenants"), deployments)
    yield victim
    victim.close()


@pytest.mark.parametrize("cached", [by_grpc, by_completions, by_responses])
def test_cached_tokens_tell_of_the_own_key_alone(victim: Victim, tmp_path: Path, cached) -> None:
    write_keys(tmp_path / "keys", **{name: (secret, None) for name, secret in SECRETS.items()})
    gateway = victim.gateway(keys_file=str(tmp_path / "keys"))
    alice, bob = (victim.caller(gateway, key=secret) for secret in SECRETS.values())
    assert [cached(alice, ""), cached(bob, "")] == [0, 0]
    assert cached(alice, "") >= 2 * BLOCK
    assert [cached(bob, "mine"), cached(alice, "mine")] == [0, 0], "a salt is its key's own"
    assert cached(bob, "mine") >= 2 * BLOCK


SAID = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("path", "name", "body"),
    [
        ("/v1/completions", "max_tokens", {"prompt": PROMPT, "ignore_eos": True}),
        ("/v1/chat/completions", "max_completion_tokens", {"messages": SAID, "ignore_eos": True}),
        ("/v1/responses", "max_output_tokens", {"input": "Hi"}),
        ("/v1/messages", "max_tokens", {"messages": SAID}),
    ],
)
def test_answers_are_no_longer_than_the_limits(victim: Victim, path: str, name: str, body: dict[str, Any]) -> None:
    caller = victim.caller(victim.gateway())
    model = caller.http.get("/v1/models").json()["data"][0]["id"]

    def ask(number: Any) -> httpx.Response:
        settings = {} if number is None else {name: number}
        return caller.http.post(path, json={"model": model, **body, **settings})

    for number in (31, "31", 10_000):
        answer = ask(number)
        assert answer.status_code == 400, (number, answer.text)
        assert "_tokens" in answer.text
    assert ask(30).status_code == 200
    if path != "/v1/messages":  # where it must be sent
        answer = ask(None)
        assert answer.status_code == 200, answer.text
        usage = answer.json().get("usage") or {}
        assert usage.get("completion_tokens", usage.get("output_tokens", 0)) <= 20
