"""The other end of a link, in a process of its own.

Run as a module this file is that process: it reads one job a line, joins that link, echoes every frame until the
link breaks, and reports the reason as one JSON line.
"""

import base64
import contextlib
import json
import os
import pickle
import queue
import select
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import tests.support.devices.cpu_device  # noqa: F401 - registers its backend
from outrider.cluster.link import Link, LinkError, host_link, join_link
from outrider.cluster.link.codec import pack, unpack

VOCAB, K = 1000, 4
DEADLINE_S = 2.0
"""The deadline of a link whose end by silence is looked at."""

AGES_S = 600.0
"""The deadline of any other link: however long this machine lets a process wait, its link lives."""

HANG_S = 60.0
"""Only a guard against hanging; nothing here measures speed."""


def invite(epoch, verifier_id, **changes):
    """changes: of host_link's arguments."""
    arguments = {
        "host": "127.0.0.1",
        "epoch": epoch,
        "backend": "auto",
        "round_deadline_ms": 100,
        "link_deadline_ms": AGES_S * 1000,
        "vocab_size": VOCAB,
        "num_speculative_tokens": K,
        "verifier_id": verifier_id,
    }
    return host_link(**arguments | changes)


def connected(backend, **changes):
    """Return two wires of this process that are connected, the verifier's first. backend: as Wire.backend names it."""
    invitation, complete = invite(1, "test", backend=asked(backend), **changes)
    joined = queue.SimpleQueue()
    seen = invitation if backend != "tcp" else replace(invitation, local_addresses=None)
    threading.Thread(target=lambda: joined.put(join_link(seen, HANG_S))).start()
    here, there = complete(HANG_S), joined.get(timeout=HANG_S)
    assert here.backend == there.backend == backend
    return here, there


def asked(backend):
    return "auto" if backend in ("ipc", "tcp") else backend


def make_link(wire, epoch, name, deadline_s, **options):
    link = Link(
        wire,
        epoch=epoch,
        link_deadline_s=deadline_s,
        decode=partial(unpack, vocab_size=VOCAB, max_tokens_k=K),
        name=name,
        **options,
    )
    link.start()
    return link


def peer_main():
    for line in sys.stdin:
        job = pickle.loads(base64.b64decode(line))
        invitation = job["invitation"]
        wire = join_link(invitation, HANG_S)
        link = make_link(wire, invitation.epoch, "peer", invitation.link_deadline_ms / 1000)
        echoed = 0
        while link.broken is None:
            received = link.poll(0.2)
            if received is not None:
                with contextlib.suppress(LinkError):
                    link.post(pack(received.messages), work_us=received.work_us + 1)
                    echoed += 1
        link.abort("done")
        assert link.join(HANG_S), "a thread or the wire is left"
        print(json.dumps({"broken": link.broken, "echoed": echoed}), flush=True)


class Peer:
    """The other process, and links to it. backend: theirs, as Wire.backend names it."""

    def __init__(self, backend="ipc"):
        self.backend = backend
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.echo_peer"],  # which makes a bare checkout importable
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # so that what can be read is in the pipe, and not in a buffer here
        )
        self.links = []
        self.epoch = 0

    def link(self, deadline_s=AGES_S, **options):
        self.epoch += 1
        changes = {"backend": asked(self.backend), "link_deadline_ms": deadline_s * 1000}
        invitation, complete = invite(self.epoch, "test", **changes)
        job = {
            "invitation": invitation if self.backend != "tcp" else replace(invitation, local_addresses=None),
        }
        self.process.stdin.write(base64.b64encode(pickle.dumps(job)) + b"\n")
        link = make_link(complete(60), self.epoch, f"link{self.epoch}", deadline_s, **options)
        self.links.append(link)
        return link

    def report(self):
        assert select.select([self.process.stdout], [], [], HANG_S)[0], "the peer's link has not ended"
        return json.loads(self.process.stdout.readline())

    def end(self):
        for link in self.links:
            link.abort("end of test")
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.communicate()


if __name__ == "__main__":
    peer_main()
