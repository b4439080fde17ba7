import json

import pytest
from starlette.requests import Request

from outrider.actors.replica_calls import RequestError
from outrider.actors.serving.http.body import _TOKENS, MAX_DEPTH, decode_json_object, read_json_object
from outrider.actors.serving.openai.errors import HttpError
from outrider.cluster.limits import LimitsConfig

LIMITS = LimitsConfig(max_request_bytes=1024)
VALUES = 200_000


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b'{"a": 1}x', "is not JSON"),
        (b"null", "is a JSON null"),
        (b"[1]", "is a JSON array"),
        (b'"a"', "is a JSON string"),
        (b"1", "is a JSON number"),
        (b'{"a": "\xff"}', "is not UTF-8"),
        (b'{"a": NaN}', "NaN is no JSON number"),
        (b'{"a": -Infinity}', "-Infinity is no JSON number"),
        (b'{"a": ' + b"9" * 5000 + b"}", "is not JSON"),
        (b"[" * 20_000, "nested too deeply"),
    ],
)
def test_what_is_no_json_object(raw, words):
    with pytest.raises(RequestError, match=words) as caught:
        decode_json_object(raw, VALUES)
    assert caught.value.field == "body"


@pytest.mark.parametrize(
    ("raw", "field"),
    [
        ('{"a": [{"b": 1e999}]}', "a.0.b"),
        ('{"a": {"b": 9223372036854775808}}', "a.b"),
        ('{"a": -9223372036854775809}', "a"),
        ('{"a": ["x", "\\ud800"]}', "a.1"),
        ('{"\\udfff": 1}', "body"),
        ('{"a": {"\\udfff": 1}}', "a"),
        ('{"a": ' + "[" * MAX_DEPTH + "]" * MAX_DEPTH + "}", "a"),
    ],
)
def test_values_that_no_model_takes(raw, field):
    with pytest.raises(RequestError) as caught:
        decode_json_object(raw.encode(), VALUES)
    assert caught.value.field == field
    str(caught.value).encode()


def test_takes_what_is_at_the_limits():
    body = {
        "int": [2**63 - 1, -(2**63)],
        "float": 1e308,
        "text": "\U0001f600 é \u0000",
        "bool": [True, False, None],
        "deep": json.loads("[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1)),
    }
    assert decode_json_object(json.dumps(body).encode(), VALUES) == body


def request(body, content_type="application/json", **headers):
    if content_type is not None:
        headers["content_type"] = content_type
    chunks = iter([body[:5], body[5:]])

    async def receive():
        chunk = next(chunks, None)
        return {"type": "http.request", "body": chunk or b"", "more_body": chunk is not None}

    encoded = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "method": "POST", "path": "/", "headers": encoded}, receive)


@pytest.mark.parametrize("end", [b"", b"\\"])
def test_a_text_without_an_end_is_gone_through_once(end):
    """From each of its quotes anew, 131 KB of them took half a minute, and nobody else was answered."""
    (found,) = _TOKENS.finditer(b'"' + b'\\"' * 3000 + end)
    assert found.end() == 6001 + len(end)
    with pytest.raises(RequestError, match=r"too many values|is not JSON"):
        decode_json_object(b'{"prompt":"' + b'\\"' * 70_000 + end, 1 << 18)


async def test_reads_in_chunks():
    assert await read_json_object(request(b'{"a": "bcdef"}'), LIMITS) == {"a": "bcdef"}


@pytest.mark.parametrize("headers", [{}, {"content_length": "1029"}, {"content_length": "999999999999999999999999"}])
async def test_too_long(headers):
    with pytest.raises(HttpError) as caught:
        await read_json_object(request(b'{"a": "%s"}' % (b"b" * 1020), **headers), LIMITS)
    assert caught.value.failure.status == 413
    assert "limits.max_request_bytes" in caught.value.failure.message


@pytest.mark.parametrize(
    "headers",
    [
        {"content_type": None},
        {"content_type": "text/plain"},
        {"content_type": "text/x+json"},
        {"content_type": "multipart/form-data; boundary=x"},
        {"content_encoding": "gzip"},
    ],
)
async def test_what_is_not_declared_as_json(headers):
    with pytest.raises(HttpError) as caught:
        await read_json_object(request(b"{}", **headers), LIMITS)
    assert caught.value.failure.status == 415


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8", "application/vnd.api+json"])
async def test_what_is_declared_as_json(kind):
    assert await read_json_object(request(b"{}", content_type=kind), LIMITS) == {}
