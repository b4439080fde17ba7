"""A target here and its drafter on another host, made of namespaces, and the wire between them, which delays, loses, is
cut. The tests follow each other."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from outrider.actors.serve_adapter import PROXY_ENVIRONMENT
from outrider.cluster.config import parse_config
from outrider.cluster.drafter_registry import LinkReport
from outrider.cluster.placement import available_cores
from outrider.deploy.ports import pick_free_port
from tests.support.cluster.clusters import nodes_of, served_on
from tests.support.cluster.pools import MAX_TOKENS, PROMPT, all_draft, ask_registry, by_target
from tests.support.cluster.serving import Deployment, Models, engine, wait_until
from tests.support.cluster.wire import HERE, THERE, Host, can_make_hosts
from tests.support.load.traffic import Traffic, allowance_s

pytestmark = [
    pytest.mark.engine,
    pytest.mark.exhaustive,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not can_make_hosts(), reason="no right to make namespaces"),
]

LOADED_WITHIN_S = 300.0
LINK_DEADLINE_S = 5.0
"""The default."""

DELAY_S, LOSS = 0.02, 0.03
OTHER_HOST = {"host": "other"}


@dataclass
class Hosts:
    app: Deployment
    other: Host

    def link(self) -> LinkReport:
        """Return the link of the only target."""
        (link,) = ask_registry(self.app, "links").values()
        assert isinstance(link, LinkReport)
        return link

    def wait_until_up(self, after_epoch: int) -> None:
        def up() -> bool:
            link = self.link()
            return link.state == "up" and link.epoch > after_epoch

        wait_until(up, LOADED_WITHIN_S, "a link", every_s=0.2)

    def late_rounds(self) -> float:
        (value,) = by_target(self.app, "outrider:late_rounds_total").values()
        return value

    @contextmanager
    def streams(self) -> Iterator[list[Traffic]]:
        """Run two streams at a time, whose answers are checked."""
        with ExitStack() as stack:
            yield [stack.enter_context(Traffic(self.app, PROMPT, MAX_TOKENS)) for _ in range(2)]


@contextmanager
def node_on(host: Host, address: str) -> Iterator[None]:
    """Run a node of the cluster on the other host, with room for an engine."""
    command = [*host.prefix, sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
    options = {
        "address": address,
        "node-ip-address": THERE,
        "num-cpus": 4,
        "labels": ",".join(f"{name}={value}" for name, value in OTHER_HOST.items()),
        "object-store-memory": 150 << 20,
    }
    given = [f"--{name}={value}" for name, value in options.items()]
    process = subprocess.Popen([*command, *given], stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
    try:
        yield
    finally:
        its = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        for each in (process, *its):
            with suppress(psutil.NoSuchProcess):
                each.kill()
        process.wait()


@pytest.fixture(scope="module")
def hosts(models: Models) -> Iterator[Hosts]:
    cores = available_cores()
    drafter = engine(models.drafter, cores=[[cores[-1]]], node_labels=OTHER_HOST)
    config = parse_config(
        {
            "target": engine(models.target, max_num_seqs=4, cores=[[cores[0]]]),
            "drafter": {"method": "draft_model", **drafter, "placement": "pool"},
            "speculation": {"num_speculative_tokens": 8, "adaptive": False},
            "serving": {"gateway": "off", "grpc_port": pick_free_port(), "http_port": pick_free_port()},
        }
    )
    assert config.link.link_deadline_ms == 1000 * LINK_DEADLINE_S
    with pytest.MonkeyPatch.context() as environment, Host() as other:
        for name, value in PROXY_ENVIRONMENT.items():
            environment.setenv(name, value)
        head = {"num_cpus": 4, "include_dashboard": False, "node_ip_address": HERE}
        cluster = Cluster(True, head_node_args=head)
        with served_on(cluster, config, models) as app, node_on(other, cluster.address):
            wait_until(app.all_replicas_are_known, LOADED_WITHIN_S, "the target", every_s=0.5)
            wait_until(lambda: ask_registry(app, "drafters"), LOADED_WITHIN_S, "a drafter", every_s=0.5)
            there = Hosts(app, other)
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
    link, late = hosts.link(), hosts.late_rounds()
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
    assert hosts.late_rounds() > late
    assert longest < hosts.app.config.link.round_deadline_ms / 1000 + allowance
