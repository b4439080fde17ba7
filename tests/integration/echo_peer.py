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
from functools import partial
from pathlib import Path

import tests.support.devices.cpu_device  # noqa: F401 - registers its backend
from outrider.cluster.link import Link, LinkError, host_link, join_link
from outrider.cluster.link.messages import pack, unpack

VOCAB, K = 1000, 4
DEADLINE_S = 2.0
"""The deadline of a link whose end by silence is looked at."""

AGES_S = 600.0
"""The deadline of any other link: however long this machine lets a process wait, its link lives."""

HANG_S = 60.0
"""Only a guard against hanging; nothing here measures speed."""


def host(backend):
    """Listen for a wire of this kind, as Wire.backend names it."""
    return host_link("127.0.0.1" if backend == "tcp" else None, "auto" if backend in ("ipc", "tcp") else backend)


def connected(backend):
    """Return two wires of this process that are connected, the verifier's first."""
    address, complete = host(backend)
    joined = queue.SimpleQueue()
    threading.Thread(target=lambda: joined.put(join_link(address, HANG_S))).start()
    here, there = complete(HANG_S), joined.get(timeout=HANG_S)
    assert here.backend == there.backend == backend
    return here, there


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
        wire = join_link(job["address"], HANG_S)
        link = make_link(wire, job["epoch"], "peer", job["deadline_s"])
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
        address, complete = host(self.backend)
        job = {"address": address, "epoch": self.epoch, "deadline_s": deadline_s}
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
