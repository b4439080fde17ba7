"""One of two target replicas is killed under load."""

import os
import signal
import threading
import time
from dataclasses import dataclass, field

import grpc
import pytest

from outrider.deploy.client.sync_client import OutriderError
from tests.serving import HANG_GUARD_S, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

STREAMS = 32
"""Sixteen run or are about to; sixteen wait for a place."""

MAX_TOKENS = 300
RAYS_OWN = ("ray", "actor", "node", "worker", "127.0.0.1", "/tmp", "oom", "memory")
"""Of what Ray says of a process that was killed, for want of memory or otherwise."""


@dataclass
class Stream:
    """A request in a thread of its own, and how it went."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    error: OutriderError | None = None
    finished: bool = False

    def run(self, client):
        try:
            with client.stream(self.prompt, temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True) as messages:
                for message in messages:
                    self.tokens += message.token_ids
            self.finished = True
        except OutriderError as error:
            self.error = error


def prompt_of(number):
    return [(number * 11 + position * 5) % 250 for position in range(40)]


def test_what_had_not_begun_is_served_and_the_rest_is_told(two_replicas):
    victim, pid = sorted(two_replicas.replicas().items())[0]
    streams = [Stream(prompt_of(number)) for number in range(STREAMS)]
    threads = [threading.Thread(target=stream.run, args=(two_replicas.client,), daemon=True) for stream in streams]
    for thread in threads:
        thread.start()
    # Both replicas work on some of them, and some have nothing yet.
    wait_until(lambda: sum(bool(stream.tokens) for stream in streams) >= 6, HANG_GUARD_S, "streams under way")
    waiting = sum(not stream.tokens for stream in streams)
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    for thread in threads:
        thread.join(max(0.0, HANG_GUARD_S - (time.monotonic() - killed)))
    assert not any(thread.is_alive() for thread in threads), "a request hangs"
    lost = [stream for stream in streams if stream.error is not None]
    print(
        f"{waiting} of {STREAMS} had not begun, {len(lost)} were lost, all over after {time.monotonic() - killed:.1f} s"
    )
    assert waiting
    assert lost, "nothing ran on the replica that was killed"
    for stream in lost:
        assert stream.error.code == grpc.StatusCode.UNAVAILABLE, stream.error
        assert stream.tokens, "a request without output was lost"
        assert stream.error.request_id, "which the log is to be searched for"
        told = str(stream.error).lower()
        assert not [word for word in RAYS_OWN if word in told], told
    for number, stream in enumerate(streams):
        if stream.error is None:
            assert stream.finished
            assert len(stream.tokens) == MAX_TOKENS
            two_replicas.reference.check(stream.prompt, stream.tokens, label=f"stream {number}")
    wait_until(
        lambda: len(two_replicas.replicas()) == 2 and victim not in two_replicas.replicas(),
        HANG_GUARD_S,
        "another replica in its place",
    )
    wait_until(two_replicas.all_replicas_are_known, 3 * HANG_GUARD_S, "the new one serves", every_s=0.5)
