"""Links over a wire made of two queues, ended after their test."""

import threading

import pytest

from outrider.cluster.link import Link
from tests.unit.link.memory_wire import SOON_S, MemoryWire


@pytest.fixture
def make_link():
    links = []

    def make(wire, deadline_s=60.0, epoch=1, decode=bytes, started=True, **options):
        link = Link(wire, epoch=epoch, link_deadline_s=deadline_s, decode=decode, name=f"test{len(links)}", **options)
        links.append(link)
        if started:
            link.start()
        return link

    yield make
    for link in links:
        link.abort("end of test")
        assert link.join(SOON_S), f"{link.name} has not ended"
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("test")]
    assert left == [], "threads survived their link"


@pytest.fixture
def pair(make_link):
    def make(**options):
        a, b = MemoryWire.pair()
        return make_link(a, **options), make_link(b, **options)

    return make
