"""Constraints meant to hurt, on a served model: each is refused by its field's name, or costs its own request alone."""

from __future__ import annotations

import threading
import time

import httpx
import pytest

from outrider.deploy.client.sync_client import OutriderError
from tests.reference import GREEDY
from tests.serving import HANG_GUARD_S, Deployment, is_idle, wait_until
from tests.stalls import Stalls
from tests.traffic import longest_gap_s

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

PROMPT = list(b"hello")
SLOW = {"type": "object", "properties": {f"p{i}": {} for i in range(4500)}}
"""Takes some ten seconds to compile."""


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


def test_a_bad_one_is_refused_by_its_field_and_a_slow_one_delays_nobody_else(pair: Deployment) -> None:
    with Bystander(pair) as bystander:
        for kind, constraint in (("regex", "(a|b)" * 400_000), ("grammar", "root ::= (")):
            with pytest.raises(OutriderError) as refused:
                pair.client.generate(PROMPT, max_tokens=10, **{kind: constraint})
            assert refused.value.code.name == "INVALID_ARGUMENT"
            assert f"sampling.structured_outputs.{kind}" in str(refused.value)
            body = {"prompt": "hello", "max_tokens": 9, "structured_outputs": {kind: constraint}}
            answer = httpx.post(f"{pair.http_url}/v1/completions", json=body, timeout=HANG_GUARD_S)
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["param"].startswith("structured_outputs")
        with pytest.raises(OutriderError) as late:
            pair.client.generate(PROMPT, max_tokens=10, json_schema=SLOW, timeout_s=2)
        assert late.value.code.name == "DEADLINE_EXCEEDED"
        seen = len(bystander.times)
        wait_until(lambda: len(bystander.times) > seen + 5, HANG_GUARD_S, "the other stream goes on")
        answer = pair.client.generate(PROMPT, max_tokens=20, choice=["yes", "no"])
        assert answer.text in ("yes", "no")
    wait_until(lambda: is_idle(pair.status()), HANG_GUARD_S, "the replica is idle")
