"""What a rollout's route answers for all replicas together."""

from __future__ import annotations

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from outrider.actors.replica_calls import ReplicaReply, RequestError
from outrider.actors.serving.failures import HttpError
from outrider.actors.serving.openai.rollouts import add_rollout_routes

GOOD = b'{"status":"paused"}'

REPLIES = {
    "all alike": ([("a", (200, GOOD)), ("b", (200, GOOD))], 200, ""),
    "one refuses": ([("a", (200, GOOD)), ("b", (400, b"no such mode"))], 400, "replica b: no such mode"),
    "one is lost": ([("a", (200, GOOD)), ("b", "it died")], 502, "replica b: it died"),
    "they differ": ([("a", (200, b"1")), ("b", (200, b"2"))], 409, "the replicas differ: replica a: 1; replica b: 2"),
}


def client_of(replies, calls=None):
    async def broadcast(target, method, call, *, timeout_s):
        if calls is not None:
            calls.append((target, method, call, timeout_s))
        return [
            ReplicaReply(name, value=value) if isinstance(value, tuple) else ReplicaReply(name, error=value)
            for name, value in replies
        ]

    app = FastAPI()
    add_rollout_routes(app, "target", broadcast, 9.0)
    return TestClient(app)


@pytest.mark.parametrize(("replies", "status", "message"), REPLIES.values(), ids=REPLIES)
def test_one_answer_for_all_or_the_first_failure_with_its_replica(replies, status, message):
    answer = client_of(replies).post("/pause")
    assert answer.status_code == status
    if message:
        assert answer.json()["error"]["message"] == message
    else:
        assert answer.content == GOOD


def test_each_replica_gets_the_request_as_it_came():
    calls = []
    client_of([("a", (200, GOOD))], calls).post("/update_weights?x=1", json={"update_info": {"path": "p"}})
    [(target, method, call, timeout_s)] = calls
    assert (target, method, timeout_s) == ("target", "whole_http", 9.0)
    assert (call.method, call.path, call.query) == ("POST", "/update_weights", b"x=1")
    assert call.body == b'{"update_info":{"path":"p"}}'
    assert dict(call.headers)[b"content-type"] == b"application/json"


def test_a_web_page_pauses_nothing():
    calls = []
    with pytest.raises((RequestError, HttpError), match="origin"):
        client_of([("a", (200, GOOD))], calls).post("/pause", headers={"origin": "http://page.example"})
    assert calls == []
