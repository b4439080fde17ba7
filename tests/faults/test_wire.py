"""A target and its drafter on two hosts, and the wire between them, which delays, loses, is cut. The tests follow each
other."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import ray

from outrider.cluster.placement import available_cores
from tests.support.cluster.clusters import nodes_of
from tests.support.cluster.hosts import LINK_DEADLINE_S, LOADED_WITHIN_S, OTHER_HOST, Hosts, served_on_hosts
from tests.support.cluster.pools import PROMPT, all_draft, ask_registry
from tests.support.cluster.serving import HANG_GUARD_S, Models, engine, wait_until
from tests.support.cluster.wire import THERE, can_make_hosts
from tests.support.load.traffic import allowance_s

pytestmark = [
    pytest.mark.engine,
    pytest.mark.exhaustive,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not can_make_hosts(), reason="no right to make namespaces"),
]

DELAY_S, LOSS = 0.02, 0.03


@pytest.fixture(scope="module")
def hosts(models: Models) -> Iterator[Hosts]:
    """Yield an application whose drafter is on the other host."""
    cores = available_cores()
    target = engine(models.target, max_num_seqs=4, cores=[[cores[0]]])
    drafter = engine(models.drafter, cores=[[cores[-1]]], node_labels=OTHER_HOST)
    with served_on_hosts(
        models,
        target=target,
        drafter={"method": "draft_model", **drafter, "placement": "pool"},
        speculation={"num_speculative_tokens": 8, "adaptive": False},
    ) as there:
        wait_until(lambda: ask_registry(there.app, "drafters"), LOADED_WITHIN_S, "a drafter", every_s=0.5)
        there.wait_until_up(0)
        yield there


def test_drafts_come_from_the_other_host(hosts: Hosts) -> None:
    (node,) = nodes_of("DrafterPool").values()
    assert next(each for each in ray.nodes() if each["NodeID"] == node)["NodeManagerAddress"] == THERE
    all_draft(hosts.app)


@pytest.mark.parametrize("weather", [{"delay_s": DELAY_S}, {"loss": LOSS}], ids=["slow", "lossy"])
def test_a_wire_that_is_slow_or_loses_frames_changes_no_answer_and_is_drafted_over(
    hosts: Hosts, weather: dict[str, float]
) -> None:
    """TCP sends lost frames again."""
    link = hosts.link()
    with hosts.other.weather(**weather):
        with hosts.streams() as streams:
            for traffic in streams:
                traffic.wait_for_messages(80)
        all_draft(hosts.app)
    assert hosts.link().epoch == link.epoch


@pytest.mark.parametrize("cut_s", [0.5 * LINK_DEADLINE_S, 1.5 * LINK_DEADLINE_S])
def test_a_cut_costs_streams_one_deadline_and_they_are_drafted_for_again(hosts: Hosts, cut_s: float) -> None:
    link, late = hosts.link(), hosts.count("outrider:late_rounds_total")
    allowance = allowance_s(hosts.app, PROMPT)
    with hosts.streams() as streams:
        with hosts.other.weather(is_cut=True):
            time.sleep(cut_s)
            for traffic in streams:
                traffic.wait_for_messages(20)
        if cut_s > LINK_DEADLINE_S:
            hosts.wait_until_up(link.epoch)
        all_draft(hosts.app)
    longest = max(traffic.longest_gap() for traffic in streams)
    print(f"cut for {cut_s:g} s: longest gap {longest:.2f} s, epoch {link.epoch} then {hosts.link().epoch}")
    assert hosts.count("outrider:late_rounds_total") > late
    assert longest < hosts.app.config.link.round_deadline_ms / 1000 + allowance


def test_a_host_that_is_gone_for_long_is_replaced_while_the_target_serves(hosts: Hosts) -> None:
    link = hosts.link()
    with hosts.streams() as streams:
        with hosts.other.weather(is_cut=True):
            wait_until(lambda: len(alive_nodes()) == 1, HANG_GUARD_S, "the other node is given up", every_s=0.5)
            for traffic in streams:
                traffic.wait_for_messages(20)
        with hosts.node():
            hosts.wait_until_up(link.epoch)
            all_draft(hosts.app)


def alive_nodes() -> list[str]:
    return [node["NodeID"] for node in ray.nodes() if node["Alive"]]
