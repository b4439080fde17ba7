"""What one key has sent is not found by another, by either API; with a real engine and a suffix drafter."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from outrider.actors.serving.access.keys import Key, as_entry, hash_of, new_secret
from outrider.deploy.client.calls import API_KEY_VARIABLE
from outrider.deploy.client.sync_client import OutriderClient
from tests.serving import CHAT_TEMPLATE, Deployment, Deployments, Models, engine

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

BLOCK = 128
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
            "target": engine(models.target),
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
