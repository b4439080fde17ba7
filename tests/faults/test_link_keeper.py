"""A real LinkKeeper in the test's process, with a real registry and a drafter that joins links and answers nothing."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from outrider.cluster.config import parse_config
from outrider.cluster.drafter_registry import Member, fingerprint
from outrider.cluster.link import HANG, Link
from outrider.cluster.link.codec import unpack
from outrider.cluster.link.keeper import LinkKeeper, ReplicaIdentity
from outrider.cluster.placement import NAMESPACE
from outrider.cluster.registry import get_or_create_registry, registry_name
from tests.support.cluster.serving import Deployments, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

APP, REPLICA, DRAFTER = "keeper-test", "r1", "Drafter:keeper-test"
LINKED_S = 90.0
"""For a link, or a process, that is made anew: both come within seconds, and the keeper tries every other second."""

VOCAB, K = 1000, 4
CONFIG = parse_config({"target": {"model": "t"}, "drafter": {"method": "ngram"}, "link": {"link_deadline_ms": 120_000}})


def silent_drafter() -> Any:
    """Defined in here so that it travels by value."""

    class Silent:
        def __init__(self) -> None:
            self._links: list[Any] = []

        def ready(self) -> str:
            return ray.util.get_node_ip_address()

        def pid(self) -> int:
            import os

            return os.getpid()

        def accept_link(self, invitation: Any, timeout_s: float) -> None:
            from outrider.cluster.link import Link, join_link
            from outrider.cluster.link.codec import unpack

            link = Link(
                join_link(invitation, timeout_s),
                epoch=invitation.epoch,
                link_deadline_s=invitation.link_deadline_ms / 1e3,
                decode=lambda payload: unpack(payload, invitation.vocab_size, invitation.num_speculative_tokens),
                name="silent",
            )
            link.start()
            self._links.append(link)

    return ray.remote(Silent).options(name=DRAFTER, namespace=NAMESPACE, num_cpus=0, max_restarts=-1).remote()


@pytest.fixture
def drafter(deployments: Deployments) -> Iterator[Any]:
    deployments.cluster()
    actor = silent_drafter()
    yield actor
    ray.kill(actor)


@pytest.fixture
def registry(drafter: Any) -> Iterator[Any]:
    yield with_replica()
    ray.kill(with_replica())


def with_replica() -> Any:
    """The registry, made when it is missing, with the replica in it: what every replica sees to."""
    registry = get_or_create_registry(APP)
    ray.get(registry.renew.remote(Member(REPLICA, DRAFTER, fingerprint=fingerprint(CONFIG)), 600.0), timeout=LINKED_S)
    return registry


@pytest.fixture
def links(registry: Any) -> Iterator[queue.SimpleQueue[Link]]:
    """Every link that the keeper brings up."""
    up: queue.SimpleQueue[Link] = queue.SimpleQueue()
    keeper = LinkKeeper(
        CONFIG,
        ReplicaIdentity(REPLICA, registry_name(APP)),
        vocab_size=VOCAB,
        decode=lambda payload: unpack(payload, VOCAB, K),
        on_link=up.put,
    )
    keeper.start()
    yield up
    keeper.stop()


def pid_of(drafter: Any) -> int | None:
    try:
        return int(ray.get(drafter.pid.remote(), timeout=LINKED_S))
    except ray.exceptions.RayActorError:
        return None  # between two lives


def next_link(links: queue.SimpleQueue[Link], what: str) -> Link:
    """Fails with what was waited for, long before the runner's own limit, which would tell nothing."""
    try:
        return links.get(timeout=LINKED_S)
    except queue.Empty:
        pytest.fail(f"{what}: no link within {LINKED_S:g} s")


def hang(link: Link) -> None:
    """Abort the link as the verifier does when a drafter answers nothing."""
    link.abort(f"{HANG}: no answer for 1 s")


def test_a_drafter_that_hangs_on_two_links_in_a_row_is_restarted_and_not_before(
    links: queue.SimpleQueue[Link], drafter: Any
) -> None:
    first = pid_of(drafter)
    hang(next_link(links, "the first"))
    second_link = next_link(links, "one after a hang")
    assert pid_of(drafter) == first, "one hang may be the link's"
    hang(second_link)
    wait_until(lambda: pid_of(drafter) not in (None, first), LINKED_S, "a new process of the drafter's")
    next_link(links, "one to the new process")


def test_links_that_end_otherwise_cost_no_drafter(links: queue.SimpleQueue[Link], drafter: Any) -> None:
    first = pid_of(drafter)
    for _ in range(3):
        next_link(links, "one after a cable was cut").abort("a cable was cut")
    next_link(links, "one after a cable was cut")
    assert pid_of(drafter) == first


def test_a_registry_that_was_made_anew_does_not_grant_epochs_again(
    links: queue.SimpleQueue[Link], registry: Any
) -> None:
    next_link(links, "the first").abort("one")
    next_link(links, "the second").abort("two")
    link = next_link(links, "the third")
    assert link.epoch >= 3
    ray.kill(registry)

    def is_gone() -> bool:
        try:
            ray.get(registry.links.remote(), timeout=LINKED_S)
        except ray.exceptions.RayActorError:
            return True
        return False

    wait_until(is_gone, LINKED_S, "the registry's end")
    with_replica()
    link.abort("three")
    assert next_link(links, "one that the new registry granted").epoch > link.epoch
