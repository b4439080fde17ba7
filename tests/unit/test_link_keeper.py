"""Whom a verifier is linked to when its own drafter comes and goes. Registry, drafters and links are scripted."""

import queue
import threading

import pytest

from outrider.cluster.config import parse_config
from outrider.cluster.link import LinkError
from outrider.cluster.link import keeper as link_keeper
from outrider.cluster.link.keeper import LinkKeeper, ReplicaIdentity
from outrider.cluster.link.link import LinkCounters
from outrider.cluster.registry import Homing, LinkReport, Membership

SOON_S = 10.0


class Wire:
    def __init__(self, drafter, epoch):
        self.drafter, self.epoch = drafter, epoch
        self.broken = None
        self.counters = LinkCounters()

    def close(self, reason):
        self.broken = reason


class ScriptedKeeper(LinkKeeper):
    """alive: drafters that can be linked to."""

    def __init__(self):
        config = parse_config({"target": {"model": "m"}, "drafter": {"method": "ngram"}})
        identity = ReplicaIdentity("r1", "Registry")
        self.links = queue.Queue()
        super().__init__(config, identity, vocab_size=9, capacity_words=64, decode=list, on_link=self.links.put)
        self.members = Membership()
        self.members.renew("r1", "D1", 1e9, now=0)
        self.members.renew("r2", "D2", 1e9, now=0)
        self.alive = {"D1", "D2"}
        self.looked = threading.Semaphore(0)

    def _ask_registry(self, method, *args):
        return None if method == "report" else getattr(self.members, method)(*args)

    def _connect(self, grant):
        if grant.drafter not in self.alive:
            raise LinkError(f"{grant.drafter} is stopped or still loading")
        self._report = LinkReport("up", grant.epoch, grant.drafter)
        return Wire(grant.drafter, grant.epoch)

    def _is_ready(self, name):
        self.looked.release()
        return name in self.alive

    def next_link(self):
        return self.links.get(timeout=SOON_S)


@pytest.fixture
def keeper(monkeypatch):
    for constant in ("_WATCH_S", "_LOOK_HOME_S", "_FIRST_RETRY_S", "_LONGEST_RETRY_S"):
        monkeypatch.setattr(link_keeper, constant, 0.001)
    monkeypatch.setattr(Homing, "FIRST_S", 0.005)
    keeper = ScriptedKeeper()
    keeper.start()
    yield keeper
    keeper.stop()
    keeper._thread.join(SOON_S)
    assert not keeper._thread.is_alive()


def lose(keeper, link, dead):
    keeper.alive -= dead
    link.broken = "connection lost"
    keeper._broken.set()


def test_a_borrowed_drafter_is_left_when_its_own_is_back(keeper):
    first = keeper.next_link()
    assert first.drafter == "D1"
    lose(keeper, first, {"D1"})
    borrowed = keeper.next_link()
    assert borrowed.drafter == "D2"
    for _ in range(3):
        assert keeper.looked.acquire(timeout=SOON_S)
    assert keeper.links.empty(), "its own is not there yet"
    keeper.alive.add("D1")
    home = keeper.next_link()
    assert home.drafter == "D1"
    assert home.epoch > borrowed.epoch
    assert borrowed.broken is None, "it serves until the verifier has taken the other"
    assert keeper.status()["drafter"] == "D1"


def test_at_home_nobody_looks(keeper):
    keeper.next_link()
    assert not keeper.looked.acquire(timeout=0.1)
    assert keeper.links.empty()


def test_a_borrowed_link_that_breaks_is_replaced_as_any(keeper):
    lose(keeper, keeper.next_link(), {"D1"})
    borrowed = keeper.next_link()
    lose(keeper, borrowed, set())
    again = keeper.next_link()
    assert (again.drafter, again.epoch > borrowed.epoch) == ("D2", True)
