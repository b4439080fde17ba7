"""One of two target replicas is killed under load, or stopped for good, or its rank 0 or its engine is."""

import os
import re
import signal
import time
from contextlib import ExitStack

import grpc
import pytest

from tests.support.cluster.processes import DRAFTER, ENGINE_CORE, TARGET, VERIFIER, engine_core, family, stopped
from tests.support.cluster.serving import HANG_GUARD_S, living_actors, wait_until
from tests.support.load.faulted import check_nothing_is_left
from tests.support.load.streams import join, started

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

STREAMS = 32
"""Sixteen run or are about to; sixteen wait for a place."""

MAX_TOKENS = 300
RAYS_OWN = ("ray", "actor", "node", "worker", "127.0.0.1", "/tmp", "oom", "memory")
"""Words that Ray uses of a process that was killed, for want of memory or otherwise."""


@pytest.mark.parametrize(
    ("what", "how"), [(TARGET, "killed"), (TARGET, "stopped"), (VERIFIER, "stopped"), (ENGINE_CORE, "stopped")]
)
def test_what_had_not_begun_is_served_and_the_rest_is_told(two_replicas, what, how):
    """A process that is stopped is noticed only when it is given up: the other replica serves meanwhile."""
    victim, replica = sorted(two_replicas.replicas().items())[0]
    named = dict(living_actors())
    pids = {TARGET: replica, **{kind: named[f"{kind}:{victim}"] for kind in (VERIFIER, DRAFTER)}}
    lost_processes = [process for pid in pids.values() for process in family(pid)]
    pids[ENGINE_CORE] = engine_core(replica)
    streams = started(two_replicas.client, STREAMS, MAX_TOKENS)
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
        served = sum(bool(stream.finish_reason) for stream in streams)
        print(f"the first is told after {time.monotonic() - struck:.1f} s; {served} were served by then")
        join(streams)
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
    assert len(lost) < STREAMS, "the other replica's went on"
    for stream in lost:
        assert stream.error.code == grpc.StatusCode.UNAVAILABLE, stream.error
        assert stream.tokens, "a request without output was lost"
        assert re.match(r"request [0-9a-f]{32}: ", stream.error.message), "the log is to be searched for it"
        told = str(stream.error).lower()
        assert not [word for word in RAYS_OWN if word in told], told
    for number, stream in enumerate(streams):
        if stream.error is None:
            assert len(stream.tokens) == MAX_TOKENS
            two_replicas.reference.check(stream.prompt, stream.tokens, label=f"stream {number}")
    wait_until(two_replicas.all_replicas_are_known, 3 * HANG_GUARD_S, "the new one serves", every_s=0.5)
