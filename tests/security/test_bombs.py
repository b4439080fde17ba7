"""Attacks by what valid requests say: schemas, nesting, floods of answers; and tests what logs tell."""

from __future__ import annotations

import json
import secrets
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray

from outrider.v1 import generation_pb2 as pb
from tests.security import attackers as raw
from tests.security.attackers import ELSEWHERE, GUARD_S, PROMPT, code_of, wait_for
from tests.security.conftest import Victim
from tests.support.load.traffic import Traffic
from tests.support.models.reference import GREEDY

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


def chain(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


SCHEMAS = {
    "wide": {"type": "object", "properties": {f"p{n}": {} for n in range(4500)}},
    "deep": chain(60),
    "recursive": {"type": "object", "properties": {"a": {"$ref": "#"}, "b": {"type": "array", "items": {"$ref": "#"}}}},
    "pattern": {"type": "string", "pattern": "(a{1,1000}){1,1000}" * 4},
    "elsewhere": {"$ref": "http://127.0.0.1:1/schema.json"},
}
CONSTRAINTS: dict[str, tuple[str, Any]] = {
    **{name: ("json", schema) for name, schema in SCHEMAS.items()},
    "regex": ("regex", "((((a{1,500}){1,500}){1,500}){1,500})"),
    "ambiguous grammar": ("grammar", "root ::= (x|y|z)*\nx ::= root [a-z ]\ny ::= root x\nz ::= root [a-z ]"),
}


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_constraint_bombs_cost_their_own_request_alone(victim: Victim, name: str) -> None:
    kind, constraint = CONSTRAINTS[name]
    text = json.dumps(constraint) if kind == "json" else constraint
    caller = victim.caller(victim.gateway(), source=ELSEWHERE)
    with Traffic(victim.deployment, PROMPT, 100, [GREEDY]) as bystander:
        constrained = pb.StructuredOutputs(**{kind: text})
        code = code_of(lambda: caller.generate(timeout_s=5, max_tokens=8, structured_outputs=constrained))
        assert code in ("OK", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED"), code
        bystander.wait_for_messages(5)
        body = {"structured_outputs": {kind: constraint}, "max_tokens": 8}
        headers = {"x-request-timeout-ms": "5000"}
        answer = caller.http.post("/v1/completions", json={"prompt": "a", **body}, headers=headers)
        assert answer.status_code in (200, 400, 408), answer.text
        if code != "DEADLINE_EXCEEDED" and answer.status_code != 408:  # how far it comes in 5 s is the machine's matter
            assert (code == "INVALID_ARGUMENT") == (answer.status_code == 400), (code, answer.text)
        bystander.wait_for_messages(5)


def test_deep_json(victim: Victim) -> None:
    caller = victim.caller(victim.gateway())
    headers = {"content-type": "application/json"}
    for depth in (900, 100_000):
        deep = "[" * depth + "]" * depth
        for path, body in (
            ("/v1/completions", '{"prompt": "a", "vllm_xargs": %s}'),
            ("/v1/completions", '{"prompt": %s}'),
            ("/v1/chat/completions", '{"messages": [{"role": "user", "content": "a"}], "tools": %s}'),
            ("/v1/responses", '{"input": %s}'),
            ("/v1/messages", '{"messages": %s, "max_tokens": 1}'),
            ("/tokenize", '{"prompt": %s}'),
            ("/outrider/v1/stream", '{"chat": {"chat_template_kwargs": {"a": %s}}}'),
        ):
            answer = caller.http.post(path, content=body % deep, headers=headers)
            assert answer.status_code in (400, 422), (path, depth, answer.status_code, answer.text[:300])
    value = b""
    for _ in range(2000):  # Value.list_value, ListValue.values
        value = _field(6, _field(1, value))
    chat = _field(1, pb.ChatMessage(role="user", content="a").SerializeToString())
    chat += _field(4, _field(1, _field(1, b"a") + _field(2, value)))
    ask = caller.channel.unary_unary("/outrider.v1.GenerationService/Generate")
    assert code_of(lambda: ask(_field(9, chat), timeout=GUARD_S)) in ("UNKNOWN", "INVALID_ARGUMENT"), "unreadable"
    caller.tokens()


def _field(number: int, content: bytes) -> bytes:
    length, rest = b"", len(content)
    while rest > 127:
        length, rest = length + bytes([rest & 127 | 128]), rest >> 7
    return bytes([number << 3 | 2]) + length + bytes([rest]) + content


def test_floods_of_answers_leave_room_for_others(victim: Victim) -> None:
    """Three requests of 64 long answers by each API. Who comes soon after them is served before they end."""
    attacker = victim.caller(victim.gateway(), source=ELSEWHERE)
    legitimate = victim.caller(victim.gateway())
    assert attacker.code(n=100_000, temperature=1.0) == "INVALID_ARGUMENT"
    assert attacker.complete(n=100_000, temperature=1).status_code == 400
    flood = {"n": 64, "max_tokens": 900, "ignore_eos": True, "temperature": 1.0}
    calls = [attacker.stream(**flood) for _ in range(3)]
    bodies = [json.dumps({"prompt": PROMPT, "stream": True, **flood}).encode() for _ in range(3)]
    with raw.held([raw.connect(int(attacker.http.base_url.port or 0), ELSEWHERE) for _ in bodies]) as connections:
        for connection, body in zip(connections, bodies, strict=True):
            connection.sendall(raw.POST + b"content-length: %d\r\n\r\n" % len(body) + body)
        wait_for(lambda: victim.deployment.status().target.waiting >= 5 * 64, "more than the engine runs at once")
        with ThreadPoolExecutor() as pool:
            both = pool.submit(legitimate.generate, max_tokens=4), pool.submit(legitimate.complete, max_tokens=4)
            assert both[0].result().token_ids == both[1].result().json()["choices"][0]["token_ids"]
        assert victim.deployment.status().target.waiting >= 2 * 64, "they were served in order of arrival"
        for call in calls:
            call.cancel()


@pytest.mark.exhaustive
def test_what_clients_send_stands_in_no_log(victim: Victim) -> None:
    gateway = victim.gateway()
    caller = victim.caller(gateway, source=ELSEWHERE)
    marks: list[str] = []

    def mark(what: str) -> str:
        marks.append(f"{what}{secrets.token_hex(8)}")
        return marks[-1]

    completions: list[dict[str, Any]] = [
        {mark("field"): 1},
        {"prompt": mark("prompt")},
        {"prompt": {mark("key"): mark("value")}},
        {"model": mark("model")},
        {"structured_outputs": {"grammar": f"root ::= {mark('rule')} ("}},
        {"structured_outputs": {"regex": f"({mark('regex')}"}},
        {"structured_outputs": {"json": {"properties": {mark("property"): {"$ref": f"#/{mark('reference')}"}}}}},
        {"vllm_xargs": {mark("argument"): "1", "speculation.verification": mark("verification")}},
        {"bad_words": [mark("word")], "temperature": mark("temperature")},
        {"lora_request": mark("adapter"), "cache_salt": mark("salt")},
    ]
    for extra in completions:
        caller.complete(**{"max_tokens": 2, **extra})
        caller.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}], **extra})
    tool = {"type": "function", "function": {"name": mark("tool"), "parameters": {"type": mark("parameters")}}}
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": mark("role"), "content": mark("content")}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "tools": [tool], "max_tokens": 2}),
        ("/v1/responses", {"input": mark("input"), "previous_response_id": mark("previous")}),
        ("/v1/messages", {"messages": [{"role": "user", "content": mark("message")}], "max_tokens": mark("most")}),
        ("/outrider/v1/stream", {mark("unknown"): mark("what")}),
        (f"/v1/{mark('path')}", {}),
        (f"/v1/completions?{mark('query')}={mark('q')}", {"prompt": 1}),
    ):
        caller.http.post(path, json=body)
    caller.http.post("/v1/completions", content=f'{{"prompt": "{mark("broken")}', headers={"x-secret": mark("header")})
    structured = pb.StructuredOutputs
    chat = pb.Chat(messages=[pb.ChatMessage(role=mark("who"), content=mark("said"))])
    chat.chat_template_kwargs[mark("variable")] = mark("kwarg")
    for asked in (
        pb.GenerateRequest(text=mark("text"), model=mark("served")),
        pb.GenerateRequest(text=mark("text"), adapter=mark("lora"), cache_salt=mark("salt")),
        pb.GenerateRequest(chat=chat),
        *(
            pb.GenerateRequest(text="a", sampling=pb.SamplingParameters(max_tokens=2, structured_outputs=each))
            for each in (
                structured(grammar=f"root ::= {mark('rule')} ("),
                structured(json=f'{{"type": "{mark("type")}"}}'),
            )
        ),
    ):
        code_of(lambda asked=asked: caller.stub.Generate(asked, timeout=GUARD_S, metadata=(("x-mark", mark("meta")),)))
    code_of(lambda: caller.channel.unary_unary(f"/{mark('service')}/{mark('method')}")(b"", timeout=GUARD_S))
    caller.tokens()
    logs = Path(ray._private.worker._global_node.get_session_dir_path()) / "logs"
    texts = {path: path.read_bytes() for path in logs.rglob("*") if path.is_file()}
    assert any(b"/v1/completions" in text for text in texts.values()), "these are not the logs of what was asked"
    texts[Path("gateway")] = gateway.output().encode()
    found = {(mark, path.name) for path, text in texts.items() for mark in marks if mark.encode() in text}
    assert not found, sorted(found)
