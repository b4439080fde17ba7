"""New weights for a served deployment: both replicas get them, by the admin port alone."""

from __future__ import annotations

import threading

import httpx
import pytest

from outrider import OutriderClient
from tests.support.cluster.outrider_serve import outrider_serve
from tests.support.cluster.serving import HANG_GUARD_S, engine, pick_free_port
from tests.support.models.reference import Reference
from tests.support.models.tiny_models import build_tiny_llama

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("one_thread"),
]

PROMPT = list(b"one two one two")
NUM_TOKENS = 24
ASKED = 8
"""Requests, so that both replicas get some."""

WATCHDOG_S = 5


@pytest.fixture(scope="module")
def admin():
    return pick_free_port()


@pytest.fixture(scope="module")
def server(models, tmp_path_factory, admin):
    target = engine(models.target, engine_args={"weight_transfer_config": {"backend": "checkpoint"}})
    serving = {"num_replicas": 2, "step_watchdog_s": WATCHDOG_S, "gateway": {"admin_port": admin}}
    directory = tmp_path_factory.mktemp("rollouts")
    with outrider_serve(models, directory, target=target, serving=serving) as served:
        yield served


def test_new_weights_reach_both_replicas(server, admin, models, tmp_path):
    new = build_tiny_llama(tmp_path / "new", noise_of=models.target, noise=0.3)
    http = httpx.Client(trust_env=False, timeout=HANG_GUARD_S, base_url=f"http://127.0.0.1:{admin}")
    with OutriderClient(server.grpc) as client, http:

        def post(path, **body):
            answer = http.post(path, json=body) if body else http.post(path)
            assert answer.status_code == 200, answer.text

        def update(checkpoint, version):
            post("/start_weight_update")
            post("/update_weights", update_info={"path": str(checkpoint)})
            post("/finish_weight_update", weight_version=version)
            assert http.get("/weight_info").json() == {"weight_version": version}

        def generate(number=0):
            answer = client.generate(PROMPT, temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, seed=number)
            return list(answer.token_ids)

        assert httpx.post(f"http://{server.http}/pause", trust_env=False).status_code == 404
        assert http.post("/pause", headers={"origin": "http://page.example"}).status_code == 400
        post("/init_weight_transfer_engine", init_info={})
        for checkpoint, version in ((new, "v1"), (models.target, "v2")):
            update(checkpoint, version)
            expected = Reference(checkpoint).greedy(PROMPT, NUM_TOKENS)
            assert [generate() for _ in range(ASKED)] == [expected] * ASKED

        post("/start_weight_update")
        failed = http.post("/update_weights", json={"update_info": {"path": str(tmp_path / "nothing")}})
        assert failed.status_code >= 400
        assert failed.json()["error"]["message"].startswith("replica ")
        assert "finish_weight_update" in http.post("/resume").text, "there are no weights to generate with"
        update(models.target, "v3")  # vLLM has ended the failed update; the next one begins anew

        post("/pause?mode=keep")
        assert http.get("/is_paused").json() == {"is_paused": True}
        found = []
        waiting = threading.Thread(target=lambda: found.append(generate()))
        waiting.start()
        waiting.join(3 * WATCHDOG_S)  # a step that is not expected is none that stalls
        assert waiting.is_alive()
        post("/resume")
        waiting.join(HANG_GUARD_S)
        assert found == [Reference(models.target).greedy(PROMPT, NUM_TOKENS)]
        assert http.get("/is_paused").json() == {"is_paused": False}
