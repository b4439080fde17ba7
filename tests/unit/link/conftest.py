"""Links over a wire made of two queues, ended after their test."""

import threading

import numpy as np
import pytest

from outrider.cluster.link import Link
from tests.unit.link.memory_transport import CAPACITY, SOON_S, MemoryTransport


@pytest.fixture
def make_link():
    links = []

    def make(transport, deadline_s=60.0, epoch=1, decode=np.ndarray.tolist, started=True, **options):
        link = Link(
            transport,
            epoch=epoch,
            capacity_words=CAPACITY,
            link_deadline_s=deadline_s,
            decode=decode,
            name=f"test{len(links)}",
            **options,
        )
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
        a, b = MemoryTransport.pair()
        return make_link(a, **options), make_link(b, **options)

    return make
