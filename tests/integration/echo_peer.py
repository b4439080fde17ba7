"""The other end of a link, in a process of its own.

Run as a module this file is that process: it reads one JSON job a line, joins that link, echoes every frame until the
link breaks, and reports the reason as one JSON line.
"""

import contextlib
import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import tests.support.devices.cpu_device  # noqa: F401 - registers its backend
from outrider.cluster.link import Link, LinkError, LinkInvitation, host_link, join_link
from outrider.cluster.link.codec import pack, unpack

VOCAB, K = 1000, 4
CAPACITY = 4096
DEADLINE_S = 2.0
"""The deadline of a link whose end by silence is looked at."""

AGES_S = 600.0
"""The deadline of any other link: however long this machine lets a process wait, its link lives."""

HANG_S = 60.0
"""Only a guard against hanging; nothing here measures speed."""

KIND_WORD, DATA = 4, 1
SECRET = bytes(range(32))
"""The secret of the application that both ends belong to."""


class FlipBit:
    """A transport that damages one word of the first DATA frame, after the checksum was written."""

    def __init__(self, transport, word):
        self._transport, self._word = transport, word

    def start_send(self, buffer):
        if buffer[KIND_WORD] == DATA and self._word is not None:
            buffer[self._word] ^= 1 << 7
            self._word = None
        return self._transport.start_send(buffer)

    def recv(self, buffer, timeout_s):
        self._transport.recv(buffer, timeout_s)

    def abort(self):
        self._transport.abort()


def invite(epoch, verifier_id, **changes):
    """changes: of host_link's arguments."""
    arguments = {
        "host": "127.0.0.1",
        "epoch": epoch,
        "backend": "gloo",
        "capacity_words": CAPACITY,
        "round_deadline_ms": 100,
        "link_deadline_ms": AGES_S * 1000,
        "vocab_size": VOCAB,
        "num_speculative_tokens": K,
        "verifier_id": verifier_id,
        "secret": SECRET,
        "sealed": False,
    }
    return host_link(**arguments | changes)


def make_link(transport, epoch, name, deadline_s, **options):
    link = Link(
        transport,
        epoch=epoch,
        capacity_words=CAPACITY,
        link_deadline_s=deadline_s,
        decode=partial(unpack, vocab_size=VOCAB, max_tokens_k=K),
        name=name,
        **options,
    )
    link.start()
    return link


def peer_main():
    for line in sys.stdin:
        job = json.loads(line)
        invitation = LinkInvitation(**{**job["invitation"], "vocabulary": ()})
        transport = FlipBit(join_link(invitation, SECRET, HANG_S), job["flip_word"])
        link = make_link(transport, invitation.epoch, "peer", invitation.link_deadline_ms / 1000)
        echoed = 0
        while link.broken is None:
            received = link.poll(0.2)
            if received is not None:
                with contextlib.suppress(LinkError):
                    link.post(pack(received.messages, CAPACITY), work_us=received.work_us + 1)
                    echoed += 1
        link.abort("done")
        assert link.join(HANG_S), "a thread or the wire is left"
        print(json.dumps({"broken": link.broken, "echoed": echoed}), flush=True)


class Peer:
    """The other process, and links to it. backend: theirs."""

    def __init__(self, backend="gloo"):
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

    def link(
        self,
        flip_word=None,
        sealed=False,
        backend=None,
        deadline_s=AGES_S,
        **options,
    ):
        self.epoch += 1
        changes = {"sealed": sealed, "backend": backend or self.backend, "link_deadline_ms": deadline_s * 1000}
        invitation, complete = invite(self.epoch, "test", **changes)
        job = {
            "invitation": dataclasses.asdict(invitation),
            "flip_word": flip_word,
        }
        self.process.stdin.write(json.dumps(job).encode() + b"\n")
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
