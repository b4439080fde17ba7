"""The engine of one of two replicas is stopped in the middle of its steps: it neither ends nor answers."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import grpc
import pytest

from outrider.deploy.client.sync_client import OutriderError
from tests.integration.test_replicas import rounds
from tests.processes import engine_core
from tests.serving import HANG_GUARD_S, Deployment, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

STREAMS = 12
"""More than one replica takes."""


def test_its_requests_are_told_and_the_replica_is_replaced(two_replicas: Deployment) -> None:
    begun: set[int] = set()
    errors: dict[int, OutriderError] = {}
    enough = threading.Event()

    def stream(number: int) -> None:
        """One after the other, so that neither replica runs dry."""
        prompt = [(number * 11 + position * 5) % 250 for position in range(40)]
        try:
            while not enough.is_set():
                for _ in two_replicas.client.stream(prompt, temperature=0.0, max_tokens=900, ignore_eos=True):
                    begun.add(number)
        except OutriderError as error:
            errors[number] = error

    threads = [threading.Thread(target=stream, args=(number,), daemon=True) for number in range(STREAMS)]
    for thread in threads:
        thread.start()
    wait_until(lambda: begun, HANG_GUARD_S, "the first stream")
    before = rounds(two_replicas)

    def those_that_work() -> list[str]:
        """Two, or nobody yet. A replica that is on its way has no engine to stop."""
        working = [replica for replica, count in rounds(two_replicas).items() if count > before.get(replica, 0)]
        return sorted(working) if len(working) == 2 else []

    victim = wait_until(those_that_work, HANG_GUARD_S, "rounds on both replicas")[0]
    assert not errors
    core = engine_core(two_replicas.replicas()[victim])
    assert core, f"no engine beneath {victim}"
    os.kill(core, signal.SIGSTOP)
    try:
        wait_until(lambda: bool(errors), HANG_GUARD_S, "word of the replica that stands still")
        enough.set()
        for thread in threads:
            thread.join(HANG_GUARD_S)
        assert not any(thread.is_alive() for thread in threads), "a request hangs"
        for error in errors.values():
            assert error.code is grpc.StatusCode.UNAVAILABLE, error
            assert error.request_id
        answer = two_replicas.client.generate([65] * 20, max_tokens=5, ignore_eos=True)
        assert len(answer.token_ids) == 5
        wait_until(
            lambda: len(two_replicas.replicas()) == 2 and victim not in two_replicas.replicas(),
            HANG_GUARD_S,
            "another replica in its place",
        )
        wait_until(lambda: not Path(f"/proc/{core}").exists(), HANG_GUARD_S, "the stopped engine is gone")
    finally:
        enough.set()
        if Path(f"/proc/{core}").exists():
            os.kill(core, signal.SIGCONT)
    wait_until(two_replicas.all_replicas_are_known, 3 * HANG_GUARD_S, "the new one serves", every_s=0.5)
