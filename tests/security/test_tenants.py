"""What one key has sent is not found by another, by either API; with a real engine and a suffix drafter."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from outrider.actors.serving.access.keys import Key, as_entry, hash_of, new_secret
from outrider.deploy.client.calls import API_KEY_VARIABLE
from outrider.deploy.client.sync_client import OutriderClient
from tests.serving import CHAT_TEMPLATE, HANG_GUARD_S, Deployment, Deployments, Models, engine, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

BLOCK = 128
SEATS = 4
FLOOD, TOGETHER_S = 32, 4.0
"""Requests of one key at once, and how soon after them another key's has to come. They count as 13 s of work, of which
10 are looked at."""

SECRETS = {"alice": new_secret(), "bob": new_secret(), "root": new_secret()}


@pytest.fixture(scope="module")
def tenants(deployments: Deployments, models: Models) -> Iterator[Deployment]:
    path = models.target.parent / "keys.yaml"
    entries = (
        Key(name=name, hash=hash_of(secret.encode()), scopes=("admin" if name == "root" else "generate",))
        for name, secret in SECRETS.items()
    )
    path.write_text("".join(map(as_entry, entries)))
    path.chmod(0o600)
    deployments.add(
        "tenants",
        {
            "target": engine(models.target, max_num_seqs=SEATS),
            "drafter": {"method": "suffix"},
            "openai": {"chat_template": CHAT_TEMPLATE},
            "serving": {"keys_file": str(path), "tenant_isolation": True},
        },
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(API_KEY_VARIABLE, SECRETS["root"])  # the deployment's own client sees whether it is up
        yield deployments.use("tenants")


def test_cached_tokens_are_not_told_across_keys_over_grpc(tenants: Deployment) -> None:
    prompt = [5 + n % 50 for n in range(3 * BLOCK)]

    def cached(name: str, salt: str | None = None) -> int:
        with OutriderClient(tenants.address, api_key=SECRETS[name]) as client:
            return client.generate(prompt, max_tokens=2, temperature=0.0, cache_salt=salt).usage.cached_tokens

    assert cached("alice") == 0
    assert cached("alice") >= 2 * BLOCK
    assert cached("bob") == 0
    assert cached("bob", "alice") == 0
    assert cached("bob", "alice") >= 2 * BLOCK


def test_cached_tokens_are_not_told_across_keys_over_http(tenants: Deployment) -> None:
    prompt = [7 + n % 40 for n in range(3 * BLOCK)]

    def cached(name: str) -> int:
        body = {"model": tenants.config.served_model_name, "prompt": prompt, "max_tokens": 2, "temperature": 0}
        headers = {"authorization": f"Bearer {SECRETS[name]}"}
        answer = httpx.post(f"{tenants.http_url}/v1/completions", json=body, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached("alice") == 0
    assert cached("alice") >= 2 * BLOCK
    assert cached("bob") == 0


@pytest.mark.parametrize("api", ["grpc", "http"])
def test_a_key_with_little_to_ask_does_not_wait_behind_one_that_floods(tenants: Deployment, api: str) -> None:
    def begun_before_bob() -> int | None:
        """How many of alice's requests had a token before bob's had one; None: bob's came too late to tell anything."""
        begun: list[str] = []

        def ask(name: str, number: int) -> None:
            """All alike. Notes when its first token came: the rest may wait for others on its way."""
            prompt = [number + 1, 9, 9]
            if api == "grpc":
                with OutriderClient(tenants.address, api_key=SECRETS[name]) as client:
                    options = {"temperature": 0.0, "max_tokens": 200, "ignore_eos": True}
                    with client.stream(prompt, **options) as messages:
                        for at, _ in enumerate(messages):
                            if at == 0:
                                begun.append(name)
                return
            body = {"model": tenants.config.served_model_name, "prompt": prompt, "max_tokens": 200, "stream": True}
            headers = {"authorization": f"Bearer {SECRETS[name]}"}
            url, body = f"{tenants.http_url}/v1/completions", {**body, "temperature": 0, "ignore_eos": True}
            with httpx.stream("POST", url, json=body, headers=headers, timeout=HANG_GUARD_S) as answer:
                answer.raise_for_status()
                for at, _ in enumerate(line for line in answer.iter_lines() if line.startswith("data: {")):
                    if at == 0:
                        begun.append(name)

        with ThreadPoolExecutor(FLOOD + 1) as clients:
            started = time.monotonic()
            asked = [clients.submit(ask, "alice", number) for number in range(FLOOD)]
            wait_until(lambda: tenants.status().target.waiting >= FLOOD - 2 * SEATS, HANG_GUARD_S, "a flood")
            apart_s = time.monotonic() - started
            asked.append(clients.submit(ask, "bob", FLOOD))
            for each in asked:
                each.result(HANG_GUARD_S)
        return begun.index("bob") if apart_s < TOGETHER_S else None

    def told() -> list[int] | None:
        found = begun_before_bob()
        return None if found is None else [found]

    (first,) = wait_until(told, HANG_GUARD_S, "a request soon after a flood")
    assert first < FLOOD * 2 / 3, "by order of arrival it would be the last"


def test_cached_tokens_are_not_told_across_keys_by_responses(tenants: Deployment) -> None:
    def cached(name: str) -> int:
        body = {"input": "The very same beginning. " * 16, "max_output_tokens": 2, "temperature": 0}
        headers = {"authorization": f"Bearer {SECRETS[name]}"}
        answer = httpx.post(f"{tenants.http_url}/v1/responses", json=body, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()["usage"]["input_tokens_details"]["cached_tokens"]

    assert cached("alice") == 0
    assert cached("alice") >= 2 * BLOCK
    assert cached("bob") == 0


def test_openais_tokens_are_counted_by_key(tenants: Deployment) -> None:
    headers = {"authorization": f"Bearer {SECRETS['root']}"}

    def counted() -> float:
        text = httpx.get(f"{tenants.http_url}/metrics", headers=headers, timeout=60).text
        name = 'outrider:key_tokens_total{key="root",kind="completion"} '
        return next((float(line.removeprefix(name)) for line in text.splitlines() if line.startswith(name)), 0.0)

    before = counted()
    asked = {"/v1/completions": {"prompt": [1, 2, 3], "max_tokens": 7}}
    asked["/v1/responses"] = {"input": "hi", "max_output_tokens": 7}
    for path, body in asked.items():
        for stream in (False, True):
            whole = {"model": tenants.config.served_model_name, "ignore_eos": True, "stream": stream, **body}
            answer = httpx.post(f"{tenants.http_url}{path}", json=whole, headers=headers, timeout=60)
            assert answer.status_code == 200, answer.text
    assert counted() - before == 28
