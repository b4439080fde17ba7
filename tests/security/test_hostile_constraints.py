"""Bombs for the compiler of grammars, on a served model: each is refused or ended by its field's name, and alone."""

from __future__ import annotations

import json
import re
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from outrider.deploy.client.sync_client import OutriderError
from tests.reference import GREEDY
from tests.serving import HANG_GUARD_S, Deployment, is_idle, wait_until
from tests.stalls import Stalls
from tests.traffic import allowance_s, longest_gap_s

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

PROMPT = list(b"hello")
BOMB = 'root ::= (x|y|z)*\nx ::= "a"\ny ::= "b"\nz ::= root [a-z ]\n'
CORNER = 'root ::= "#" bomb | [0-9]+\nbomb ::= (x|y|z)*\nx ::= "a"\ny ::= "b"\nz ::= bomb [a-z ]\n'

BOMBS: dict[str, dict[str, Any]] = {
    "grammar of 80 bytes": {"grammar": BOMB},
    "optional properties": {"json_schema": {"type": "object", "properties": {f"p{i}": {} for i in range(4500)}}},
    "schema of 50 KB": {
        "json_schema": {
            "type": "object",
            "properties": {f"p{i}": {"anyOf": [{"type": "string"}, {"const": i}]} for i in range(1000)},
            "patternProperties": {"^(a{1,90}){1,90}$": {"type": "string", "pattern": "^((b{1,99}){1,99}){1,99}$"}},
        }
    },
    "regex of 2 MB": {"regex": "(a|b)" * 400_000},
    "regex that unfolds": {"regex": "|".join(f"[a-z]{{{i}}}{i}" for i in range(1, 1500))},
}


class Bystander:
    """A client that streams on while something happens: one answer of max_tokens after the other."""

    def __init__(self, deployment: Deployment, max_tokens: int = 400) -> None:
        self._deployment, self._max_tokens = deployment, max_tokens
        self.times: list[float] = []
        self.error: Exception | None = None
        self._stalls = Stalls()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                with self._deployment.client.stream(
                    PROMPT, max_tokens=self._max_tokens, ignore_eos=True, **GREEDY.options()
                ) as stream:
                    self.times += [time.monotonic() for _ in stream]
        except Exception as error:  # noqa: BLE001 - told on leaving
            self.error = error

    def __enter__(self) -> Bystander:
        self._stalls.__enter__()
        self._thread.start()
        wait_until(lambda: len(self.times) > 5 or not self._thread.is_alive(), HANG_GUARD_S, "the stream begins")
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(HANG_GUARD_S)
        self._stalls.__exit__(None, None, None)
        assert self.error is None, self.error
        assert not self._thread.is_alive()

    @property
    def longest_gap(self) -> float:
        return longest_gap_s(self.times, self._stalls)


def resident_bytes(deployment: Deployment) -> int:
    """Of the replica and all that descends from it, the engine's core and its compilers among them. A page that several
    have in common counts once: what is forked from the keeper shares nearly all it has with it, and a constraint
    that is kept for the next request would be 180 MB by its own account."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/status"):
        with suppress(OSError):
            parents[int(path.parent.name)] = int(re.findall(r"PPid:\t(\d+)", path.read_text())[0])
    ours = set(deployment.replicas().values())
    while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
        ours |= more
    resident = 0
    for pid in ours:
        with suppress(OSError):  # it has ended meanwhile
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            resident += sum(int(size) << 10 for size in re.findall(r"Pss_Anon:\s+(\d+) kB", rollup))
    assert resident, "this kernel does not say what processes share"
    return resident


def is_late(error: OutriderError) -> bool:
    """Its process had not its share of the processors, which says nothing of the constraint: to be asked again."""
    return error.code.name == "UNAVAILABLE" and "took too long on a busy server" in str(error)


def refused(deployment: Deployment, **constraint: Any) -> OutriderError:
    give_up_s = time.monotonic() + HANG_GUARD_S
    while True:
        with pytest.raises(OutriderError) as error:
            for _ in deployment.client.stream(PROMPT, min_tokens=850, max_tokens=900, seed=1, **constraint):
                pass
        if not is_late(error.value) or time.monotonic() > give_up_s:
            return error.value


QUICKEST = "schema of 50 KB"

MOST_HELD_UP_S = 1.0
"""Beyond what the machine itself takes."""


@pytest.mark.parametrize(
    "bomb", [QUICKEST, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in BOMBS if name != QUICKEST)]
)
def test_a_bomb_is_refused_by_its_field_while_another_clients_stream_goes_on(pair: Deployment, bomb: str) -> None:
    most = allowance_s(pair, PROMPT) + MOST_HELD_UP_S
    list(pair.client.stream(PROMPT, max_tokens=20, json_schema={"type": "object"}))
    before = resident_bytes(pair)
    with Bystander(pair) as bystander:
        error = refused(pair, **BOMBS[bomb])
        seen = len(bystander.times)
        wait_until(lambda: len(bystander.times) > seen, HANG_GUARD_S, "the other stream goes on")
    assert error.code.name == "INVALID_ARGUMENT"
    assert "sampling.structured_outputs." in str(error)
    assert bystander.longest_gap <= most
    wait_until(lambda: is_idle(pair.status()), HANG_GUARD_S, "the replica is idle")
    wait_until(lambda: resident_bytes(pair) - before <= 64 << 20, HANG_GUARD_S, "its memory is what it was")


@pytest.mark.exhaustive
def test_over_http_it_is_a_400_with_the_field_it_came_in(pair: Deployment) -> None:
    schema = BOMBS["schema of 50 KB"]["json_schema"]
    body = {
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 100,
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
    }
    for stream in (False, True):
        answer = httpx.post(
            f"{pair.http_url}/v1/chat/completions", json={**body, "stream": stream}, timeout=HANG_GUARD_S
        )
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == "response_format"
    answer = httpx.post(
        f"{pair.http_url}/v1/completions",
        json={"prompt": "hello", "min_tokens": 850, "max_tokens": 900, "structured_outputs": {"grammar": BOMB}},
        timeout=HANG_GUARD_S,
    )
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith("structured_outputs")


@pytest.mark.exhaustive
def test_what_is_slow_only_where_a_prompt_leads_ends_its_own_request(pair: Deployment) -> None:
    """And one with a constraint of its own beside it goes on to its end."""
    most = allowance_s(pair, PROMPT) + MOST_HELD_UP_S
    neighbour: list[str] = []

    def write_json() -> None:
        schema = {"type": "array", "items": {"enum": list(range(100))}, "minItems": 80}
        while not neighbour:
            try:
                neighbour.append(pair.client.generate(PROMPT, max_tokens=200, seed=3, json_schema=schema).text)
            except OutriderError as error:
                if not is_late(error):
                    raise

    beside = threading.Thread(target=write_json, daemon=True)
    with Bystander(pair) as bystander:
        beside.start()
        error = refused(pair, grammar=CORNER, logit_bias={ord("#"): 100.0, ord("a"): 50.0})
        beside.join(HANG_GUARD_S)
    assert error.code.name == "INVALID_ARGUMENT"
    assert "sampling.structured_outputs.grammar" in str(error)
    assert bystander.longest_gap <= most
    assert neighbour, "the neighbour was ended, too"
    assert neighbour[0].startswith("[")


def test_schemas_whose_clients_have_gone_are_compiled_no_further(pair: Deployment) -> None:
    """Their processes end with them, and the next constraint is answered."""
    for number in range(2):
        schema = {**BOMBS["optional properties"]["json_schema"], "title": f"{number}"}
        with pytest.raises(OutriderError):
            pair.client.generate(PROMPT, max_tokens=10, json_schema=json.dumps(schema), timeout_s=0.3)
    answer = pair.client.generate(PROMPT, max_tokens=20, choice=["yes", "no"])
    assert answer.text in ("yes", "no")
