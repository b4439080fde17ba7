"""Who is let in, what they are told, and what is written down of it."""

from __future__ import annotations

from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest

from outrider.actors.serving.access.files import Reloading
from outrider.actors.serving.access.guard import (
    CALLER,
    GRPC_CALLS,
    HTTP_CALLS,
    LINES_A_SECOND,
    NOBODY,
    OPEN,
    OTHER,
    PAGE,
    Asked,
    Guard,
    Refused,
    caller_at,
    http_headers,
    need_of_http,
    need_of_rpc,
)
from outrider.actors.serving.access.keys import Key, KeyRing, hash_of, new_secret
from outrider.actors.serving.access.owners import cache_salt, tenant_of

NOW = datetime(2030, 1, 1, tzinfo=UTC)
GENERATE = GRPC_CALLS["/outrider.v1.GenerationService/Generate"]
STATUS = GRPC_CALLS["/outrider.v1.GenerationService/GetServerStatus"]
CODE = grpc.StatusCode


class Rig:
    """A guard with keys of these names; their secrets by name."""

    def __init__(self, tmp_path: Path, **keys: dict[str, Any]) -> None:
        self.secrets = {name: new_secret() for name in keys}
        ring = KeyRing(
            [Key(name=name, hash=hash_of(self.secrets[name].encode()), **more) for name, more in keys.items()]
        )
        self.refusals: list[tuple[str, str, str]] = []
        self.tokens: list[tuple[str, int, int]] = []
        self.now_s = 1000.0
        self.guard = Guard(
            Reloading([tmp_path], lambda: ring),
            on_refusal=lambda *each: self.refusals.append(each),
            on_tokens=lambda *each: self.tokens.append(each),
            clock=lambda: self.now_s,
            now=lambda: NOW,
        )

    def ask(self, header: str | None, need: Any = GENERATE, name: str = "call") -> Any:
        with self.guard.admit(Asked("grpc", name, header, "ipv4:10.0.0.9:5", need)) as caller:
            return caller

    def bearer(self, name: str) -> str:
        return f"Bearer {self.secrets[name]}"

    def refused(self, header: str | None, need: Any = GENERATE) -> Refused:
        with pytest.raises(Refused) as caught:
            self.ask(header, need)
        return caught.value


@pytest.fixture
def rig(tmp_path) -> Rig:
    return Rig(
        tmp_path,
        ci={"scopes": ("generate",)},
        ops={"scopes": ("status",)},
        root={"scopes": ("admin",)},
        old={"scopes": ("generate",), "expires": NOW - timedelta(seconds=1)},
        narrow={"scopes": ("generate",), "concurrent_requests": 1},
        slow={"scopes": ("generate",), "requests_per_minute": 1},
    )


def test_the_right_key_comes_in_and_is_known_by_its_name(rig):
    assert rig.ask(rig.bearer("ci")).key.name == "ci"
    lower = rig.bearer("ci").replace("Bearer", "bearer")
    with rig.guard.admit(Asked("grpc", "call", lower, "p", GENERATE)):
        caller = CALLER.get()
        assert caller is not None
        assert caller.key.name == "ci"
        caller.used(3, 4)
        assert caller_at("10.0.0.9") == "key ci"
    assert CALLER.get() is None
    assert caller_at("10.0.0.9") == "10.0.0.9"
    assert rig.tokens == [("ci", 3, 4)]
    assert rig.refusals == []


@pytest.mark.parametrize(
    "header", ["Bearer x", "Bearer ", "Bearer", "Basic abc", "x", "Bearer \udcff", "Bearer " + "x" * 100_000]
)
def test_what_is_no_key_here_does_not_come_in(rig, header):
    refused = rig.refused(header)
    assert (refused.code, refused.reason, refused.key) == (CODE.UNAUTHENTICATED, "WRONG_KEY", NOBODY)


def test_every_refusal_has_its_code_its_reason_and_the_keys_name(rig):
    assert (rig.refused(None).code, rig.refused("").reason) == (CODE.UNAUTHENTICATED, "NO_KEY")
    old = rig.refused(rig.bearer("old"))
    assert (old.code, old.reason, old.key) == (CODE.UNAUTHENTICATED, "KEY_EXPIRED", "old")
    other = rig.refused(rig.bearer("ops"))
    assert (other.code, other.reason, other.key) == (CODE.PERMISSION_DENIED, "SCOPE_MISSING", "ops")
    assert "the scope generate" in other.sentence
    assert rig.refused(rig.bearer("ci"), STATUS).reason == "SCOPE_MISSING"
    rig.ask(rig.bearer("slow"))
    slow = rig.refused(rig.bearer("slow"))
    assert (slow.code, slow.reason) == (CODE.RESOURCE_EXHAUSTED, "REQUESTS_PER_MINUTE")
    assert http_headers(slow) == {"Retry-After": "60"}
    assert http_headers(old) == {"WWW-Authenticate": "Bearer"}
    assert slow.failure().message == "authorization: the key's requests_per_minute (1) are used up; retry in 60 s"
    with ExitStack() as running:
        asked = Asked("grpc", "call", rig.bearer("narrow"), "p", GENERATE)
        running.enter_context(rig.guard.admit(asked))
        assert rig.refused(rig.bearer("narrow")).reason == "CONCURRENT_REQUESTS"
    rig.ask(rig.bearer("narrow"))


def test_an_admin_may_do_everything(rig):
    for need in (*GRPC_CALLS.values(), *HTTP_CALLS.values(), OTHER):
        rig.ask(rig.bearer("root"), need)


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/v1/unload_lora_adapter"])
def test_adapters_come_and_go_by_an_admin_alone(rig, path):
    assert need_of_http("POST", path) == need_of_http("POST", f"/mine{path}", behind_prefix=True)
    rig.ask(rig.bearer("root"), need_of_http("POST", path))
    for name in ("ci", "ops"):
        assert rig.refused(rig.bearer(name), need_of_http("POST", path)).reason == "SCOPE_MISSING"


def test_drafters_go_back_for_an_admin_alone(rig):
    need = need_of_rpc("RevertDrafter")
    rig.ask(rig.bearer("root"), need)
    for name in ("ci", "ops"):
        assert rig.refused(rig.bearer(name), need).reason == "SCOPE_MISSING"


def test_health_and_the_page_take_no_key(rig):
    assert rig.ask(None, OPEN) is None
    for path in ("/health", "/ping", "/", "/outrider/page/page.js", "/-/healthz"):
        for method in ("GET", "HEAD"):
            assert need_of_http(method, path) is OPEN
            assert need_of_http(method, path, behind_prefix=True) is OPEN


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", ""])
@pytest.mark.parametrize("path", ["/", "/health", "/livez", "/-/healthz", "/outrider/page/", f"{PAGE}v1/completions"])
def test_nobody_sends_anything_without_one_but_a_probe_that_is_not_read(method, path):
    for behind_prefix in (False, True):
        assert need_of_http(method, path, behind_prefix=behind_prefix) is OTHER
        assert (need_of_http(method, "/ping", behind_prefix=behind_prefix) is OPEN) == (method == "POST")


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize(
    "path",
    ["/v1/chat/completions", "/v1/completions", "/tokenize", "/metrics", "/v1/models", "/openapi.json", "/anything",
     "/outrider/v1/status", "/outrider/page/../../metrics", "//", "", "/health/", "/v1/completions/"],
)  # fmt: skip
def test_everything_else_over_http_takes_one(method, path):
    assert need_of_http(method, path).scopes
    assert need_of_http(method, path, behind_prefix=True).scopes


def test_an_application_behind_a_prefix_has_the_same_needs():
    assert need_of_http("POST", "/mine/v1/completions", behind_prefix=True) == HTTP_CALLS["/v1/completions"]
    assert need_of_http("GET", "/mine/health", behind_prefix=True) is OPEN
    assert need_of_http("GET", "/mine/health") is OTHER
    assert need_of_http("GET", "/mine/", behind_prefix=True) is OTHER


def test_one_line_a_refusal_without_what_was_shown(rig, caplog):
    rig.refused(rig.bearer("old"))
    rig.refused("Bearer outrider_not-a-key")
    with pytest.raises(Refused):
        rig.ask(None, GENERATE, "/x\nrefused: reason=FORGED " + "y" * 500)
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "refused: reason=KEY_EXPIRED key=old api=grpc call=call peer=ipv4:10.0.0.9:5"
    assert lines[1] == "refused: reason=WRONG_KEY key=- api=grpc call=call peer=ipv4:10.0.0.9:5"
    assert len(lines) == 3
    assert "\n" not in lines[2]
    assert len(lines[2]) < 300
    assert rig.secrets["old"] not in caplog.text
    assert "not-a-key" not in caplog.text
    assert rig.refusals == [("grpc", "old", "KEY_EXPIRED"), ("grpc", NOBODY, "WRONG_KEY"), ("grpc", NOBODY, "NO_KEY")]


def test_a_flood_of_refusals_is_counted_in_full_and_logged_in_part(rig, caplog):
    for _ in range(LINES_A_SECOND + 30):
        rig.refused(None)
    assert len(caplog.records) == LINES_A_SECOND
    rig.now_s += 1
    rig.refused(None)
    assert caplog.records[-2].getMessage() == "refused: 30 more that are not told one by one"
    assert len(rig.refusals) == LINES_A_SECOND + 31


def test_no_key_can_make_anothers_salt(rig):
    ci, ops = (tenant_of(rig.ask(rig.bearer(name), OTHER)) for name in ("ci", "ops"))
    assert 0 < ci != ops < 2**63
    assert tenant_of(None) == 0
    assert cache_salt(0, None) is None
    assert cache_salt(0, "mine") == "mine"
    tries = (None, "a", f"{ops}\0", cache_salt(ops, None))
    salts = {cache_salt(tenant, asked) for tenant in (ci, ops) for asked in tries}
    assert len(salts) == 8
    assert cache_salt(ci, "a") == cache_salt(ci, "a")
