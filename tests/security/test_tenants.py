"""With ``serving.tenant_isolation``, ``cached_tokens`` are those of the caller's own prompts, by either API."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.deploy.keys import new_secret
from tests.security.attackers import PROMPT, Caller
from tests.security.conftest import Victim
from tests.security.test_access import write_keys
from tests.serving import CHAT_TEMPLATE, Deployments, Models, engine

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

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


@pytest.mark.parametrize("cached", [by_grpc, by_completions, by_responses])
def test_cached_tokens_tell_of_the_own_key_alone(
    deployments: Deployments, models: Models, tmp_path: Path, cached
) -> None:
    deployments.add(
        "tenants",
        {
            "target": engine(models.target),
            "drafter": {"method": "suffix"},
            "openai": {"chat_template": CHAT_TEMPLATE},
            "serving": {"tenant_isolation": True},
        },
    )
    victim = Victim(deployments.use("tenants"), deployments)
    write_keys(tmp_path / "keys", **{name: (secret, None) for name, secret in SECRETS.items()})
    gateway = victim.gateway(keys_file=str(tmp_path / "keys"))
    try:
        alice, bob = (victim.caller(gateway, key=secret) for secret in SECRETS.values())
        assert [cached(alice, ""), cached(bob, "")] == [0, 0]
        assert cached(alice, "") >= 2 * BLOCK
        assert [cached(bob, "mine"), cached(alice, "mine")] == [0, 0], "a salt is its key's own"
        assert cached(bob, "mine") >= 2 * BLOCK
    finally:
        victim.close()
