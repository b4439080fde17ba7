"""One of two target replicas is killed under load, or stopped for good, or its rank 0 is."""

import os
import signal
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field

import grpc
import pytest

from outrider.deploy.client.sync_client import OutriderError
from tests.faulted import check_nothing_is_left
from tests.processes import DRAFTER, TARGET, VERIFIER, family, stopped
from tests.serving import HANG_GUARD_S, living_actors, wait_until

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


@pytest.mark.parametrize(("what", "how"), [(TARGET, "killed"), (TARGET, "stopped"), (VERIFIER, "stopped")])
def test_what_had_not_begun_is_served_and_the_rest_is_told(two_replicas, what, how):
    """Of what is stopped nobody knows until it is given up: the other replica serves meanwhile."""
    victim, replica = sorted(two_replicas.replicas().items())[0]
    named = dict(living_actors())
    pids = {TARGET: replica, **{kind: named[f"{kind}:{victim}"] for kind in (VERIFIER, DRAFTER)}}
    lost_processes = [process for pid in pids.values() for process in family(pid)]
    streams = [Stream(prompt_of(number)) for number in range(STREAMS)]
    threads = [threading.Thread(target=stream.run, args=(two_replicas.client,), daemon=True) for stream in streams]
    for thread in threads:
        thread.start()
    # Both replicas work on some of them, and some have nothing yet.
    wait_until(lambda: sum(bool(stream.tokens) for stream in streams) >= 6, HANG_GUARD_S, "streams under way")
    waiting = sum(not stream.tokens for stream in streams)
    with ExitStack() as for_good:
        if how == "killed":
            os.kill(pids[what], signal.SIGKILL)
        else:
            for_good.enter_context(stopped(pids[what]))
        struck = time.monotonic()
        wait_until(lambda: any(stream.error for stream in streams), HANG_GUARD_S, "the first is told")
        served = sum(stream.finished for stream in streams)
        print(f"the first is told after {time.monotonic() - struck:.1f} s; {served} were served by then")
        for thread in threads:
            thread.join(max(0.0, HANG_GUARD_S - (time.monotonic() - struck)))
        assert not any(thread.is_alive() for thread in threads), "a request hangs"
        lost = [stream for stream in streams if stream.error is not None]
        print(f"{waiting} had not begun, {len(lost)} were lost, all over after {time.monotonic() - struck:.1f} s")
        wait_until(
            lambda: len(two_replicas.replicas()) == 2 and victim not in two_replicas.replicas(),
            HANG_GUARD_S,
            "another replica in its place",
        )
        check_nothing_is_left(lost_processes)
        print(f"replaced after {time.monotonic() - struck:.1f} s")
    assert served or how == "killed", "the other replica stood still, too"
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
    wait_until(two_replicas.all_replicas_are_known, 3 * HANG_GUARD_S, "the new one serves", every_s=0.5)
