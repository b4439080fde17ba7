"""Whom a verifier is linked to when its own drafter comes and goes. Registry, drafters and links are scripted."""

import queue
import threading
from contextlib import contextmanager

import pytest

from outrider.cluster.config import ConfigError, parse_config
from outrider.cluster.drafter_registry import DrafterRegistry, LinkReport, Member
from outrider.cluster.link import LinkCounters, LinkError
from outrider.cluster.link import keeper as link_keeper
from outrider.cluster.link.keeper import LinkKeeper, ReplicaIdentity

SOON_S = 60.0


class Wire:
    def __init__(self, drafter, epoch):
        self.drafter, self.epoch = drafter, epoch
        self.broken = None
        self.counters = LinkCounters()

    def close(self, reason):
        self.broken = reason

    def join(self):
        pass


class ScriptedKeeper(LinkKeeper):
    """alive: drafters that can be linked to."""

    def __init__(self):
        config = parse_config({"target": {"model": "m"}, "drafter": {"method": "ngram"}})
        identity = ReplicaIdentity("r1", "Registry")
        self.links = queue.Queue()
        super().__init__(config, identity, vocab_size=9, decode=list, on_link=self.links.put)
        self._node = "here"
        self.members = DrafterRegistry()
        self.members.renew(Member("r1", "D1", fingerprint=self._fingerprint), 1e9, now=0)
        self.members.renew(Member("r2", "D2", fingerprint=self._fingerprint), 1e9, now=0)
        self.alive = {"D1", "D2"}
        self.looked = threading.Semaphore(0)

    def _ask_registry(self, method, *args):
        return None if method == "report" else getattr(self.members, method)(*args, 0.0)

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


@contextmanager
def running(keeper):
    keeper.start()
    yield keeper
    keeper.stop()
    keeper._thread.join(SOON_S)
    assert not keeper._thread.is_alive()


@pytest.fixture
def prepared(monkeypatch):
    """Not running yet."""
    for constant in ("_WATCH_S", "_LOOK_S", "_FIRST_RETRY_S", "_LONGEST_RETRY_S"):
        monkeypatch.setattr(link_keeper, constant, 0.001)
    monkeypatch.setattr(link_keeper, "FAILBACK_S", 0.005)
    return ScriptedKeeper()


@pytest.fixture
def keeper(prepared):
    with running(prepared):
        yield prepared


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


def test_a_drafter_that_is_about_to_go_is_left_without_a_while(prepared, monkeypatch):
    monkeypatch.setattr(link_keeper, "FAILBACK_S", 1e6)
    prepared._pooled = True
    prepared.members.leave("r1")
    prepared.members.leave("r2")
    for name in ("D1", "D2"):
        member = Member(f"p-{name}", name, pooled=True, fingerprint=prepared._fingerprint)
        prepared.members.renew(member, 1e9, now=0)
    with running(prepared) as keeper:
        first = keeper.next_link()
        keeper.members.drain(f"p-{first.drafter}")
        second = keeper.next_link()
        assert {first.drafter, second.drafter} == {"D1", "D2"}
        assert first.broken is None, "its requests have to move first"


def test_a_borrowed_link_that_breaks_is_replaced_as_any(keeper):
    lose(keeper, keeper.next_link(), {"D1"})
    borrowed = keeper.next_link()
    lose(keeper, borrowed, set())
    again = keeper.next_link()
    assert (again.drafter, again.epoch > borrowed.epoch) == ("D2", True)


def test_epochs_go_on_behind_those_of_a_registry_that_was_lost(keeper):
    link = keeper.next_link()
    keeper.members = DrafterRegistry()
    keeper.members.renew(Member("r1", "D1", fingerprint=keeper._fingerprint), 1e9, now=0)
    lose(keeper, link, set())
    assert keeper.next_link().epoch > link.epoch


def test_a_borrowed_drafter_is_kept_until_its_own_has_been_ready_for_a_while(prepared, monkeypatch):
    monkeypatch.setattr(link_keeper, "FAILBACK_S", 1e6)
    with running(prepared) as keeper:
        lose(keeper, keeper.next_link(), {"D1"})
        assert keeper.next_link().drafter == "D2"
        keeper.alive.add("D1")
        for _ in range(5):
            assert keeper.looked.acquire(timeout=SOON_S)
        assert keeper.links.empty()


@pytest.mark.parametrize("backend", ["nccl", "hccl", "xccl"])
def test_a_verifier_without_the_backend_does_not_start(backend):
    import torch

    if torch.distributed.is_backend_available(backend):
        pytest.skip("this torch has it")
    config = parse_config(
        {"target": {"model": "m"}, "drafter": {"method": "draft_model", "model": "d"}, "link": {"backend": backend}}
    )
    with pytest.raises(ConfigError, match=rf"^link\.backend: {backend} needs a device .* has no such backend"):
        LinkKeeper(config, ReplicaIdentity("r1", "Registry"), vocab_size=9, decode=list, on_link=print)
