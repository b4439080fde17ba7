"""Nodes of a cluster are removed and drained under load: two targets and a pool of two drafters, on a node each.

Nodes are raylets of one machine, the head without processors. The tests follow each other on one application.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import pytest
import ray
from ray import serve
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2

from outrider.actors.serve_adapter import SERVE_ENVIRONMENT
from outrider.cluster.config import parse_config
from outrider.cluster.placement import available_cores
from outrider.deploy.ports import pick_free_port
from outrider.deploy.server import UNSCHEDULED
from tests.support.cluster.clusters import actor_nodes, nodes_of, served_on
from tests.support.cluster.pools import all_draft, ask_registry, is_even, load, shares
from tests.support.cluster.serving import HANG_GUARD_S, Deployment, Models, engine, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.exhaustive, pytest.mark.timeout(900)]

STREAMS, MAX_TOKENS = 8, 400
LOADED_WITHIN_S = 300.0
"""A replica that loads its model while requests run on few cores."""

DRAINED_WITHIN_S = 600

STORE_IS_GONE_S = 10.0
"""Less than Ray's nodes wait for it: 60 s."""


@dataclass
class Nodes:
    """An application on a cluster of its own, and the nodes that its parts are on."""

    cluster: Cluster
    app: Deployment
    waited: set[str]
    """While there was no node but the head: the deployments that waited, by Serve's status."""

    def add(self, role: str) -> str:
        """Add a node that has room for a target, or for a drafter. Returns its id."""
        return str(self.cluster.add_node(num_cpus=2, labels={"role": role}).node_id)

    def a_target(self) -> tuple[str, str]:
        """Return a target and its node, which is not an ingress's: losing that is another matter."""
        fronts = set(nodes_of("Ingress").values())
        return next((replica, node) for replica, node in nodes_of("Target").items() if node not in fronts)

    def remove(self, node_id: str) -> None:
        """Remove a node like a machine whose power is cut."""
        (node,) = [node for node in self.cluster.worker_nodes if node.node_id == node_id]
        self.cluster.remove_node(node, allow_graceful=False)

    def drain(self, node_id: str) -> None:
        """Announce that a node goes, and when, as an autoscaler does."""
        reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        deadline_ms = int((time.time() + DRAINED_WITHIN_S) * 1000)
        accepted, why_not = ray._raylet.GcsClient(address=self.cluster.address).drain_node(
            node_id, reason, "a test", deadline_ms
        )
        assert accepted, why_not

    def wait_for_targets(self) -> None:
        wait_until(self.app.all_replicas_are_known, LOADED_WITHIN_S, "both targets", every_s=0.5)


@pytest.fixture(scope="module")
def nodes(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    cores = available_cores()
    pinned = [[[cores[number % len(cores)]]] for number in range(2)]
    config = parse_config(
        {
            "target": engine(models.target, max_num_seqs=4, cores=pinned[0], node_labels={"role": "target"}),
            "drafter": {
                "method": "draft_model",
                **engine(models.drafter, cores=pinned[1], node_labels={"role": "drafter"}),
                "placement": "pool",
                "num_drafters": 2,
            },
            "speculation": {"num_speculative_tokens": 8, "adaptive": False},
            "link": {"link_deadline_ms": 10_000},
            "serving": {
                "num_replicas": 2,
                "gateway": "off",
                "grpc_port": pick_free_port(),
                "http_port": pick_free_port(),
            },
        }
    )
    os.environ.update(SERVE_ENVIRONMENT)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_gcs_storage", "rocksdb")
        environment.setenv("RAY_gcs_storage_path", str(tmp_path_factory.mktemp("gcs")))
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        with served_on(cluster, config, models) as app:
            wait_until(lambda: len(_waiting()) == 2, LOADED_WITHIN_S, "a status of what waits", every_s=0.5)
            there = Nodes(cluster, app, _waiting())
            for role in ("target", "target", "drafter", "drafter"):
                there.add(role)
            there.wait_for_targets()
            yield there


def _waiting() -> set[str]:
    """Return the deployments that Serve says wait for room."""
    applications = serve.status().applications.values()
    found = (pair for application in applications for pair in application.deployments.items())
    return {name for name, deployment in found if UNSCHEDULED in deployment.message}


def test_nodes_that_come_are_used_by_their_labels(nodes: Nodes) -> None:
    """The application was sent to the head alone, and said what it waited for."""
    assert nodes.waited == {"Target", "DrafterPool"}
    wait_until(lambda: not _waiting(), HANG_GUARD_S, "word that nothing waits any more", every_s=0.5)
    labels = {node["NodeID"]: node["Labels"].get("role") for node in ray.nodes()}
    for deployment, role in (("Target", "target"), ("DrafterPool", "drafter")):
        found = nodes_of(deployment)
        assert len(set(found.values())) == 2, "one each"
        assert {labels[node] for node in found.values()} == {role}
    wait_until(lambda: is_even(nodes.app), LOADED_WITHIN_S, "a drafter each")
    all_draft(nodes.app)
    (registry,) = [node for name, node in actor_nodes().items() if name.startswith("Registry:")]
    assert registry == nodes.cluster.head_node.node_id, "it goes with no node that an autoscaler may end"


def test_the_cluster_s_store_goes_and_comes_back_and_no_answer_is_lost(nodes: Nodes) -> None:
    """GCS, which knows of every actor and node: what runs goes on without it, and what came anew is known after."""
    wait_until(lambda: is_even(nodes.app), LOADED_WITHIN_S, "a drafter each")
    before = {of: nodes_of(of) for of in ("Ingress", "Target", "DrafterPool")}
    with load(nodes.app):
        nodes.cluster.head_node.kill_gcs_server()
        gone = time.monotonic()
        prompt = list(b"Nobody keeps the books now.")
        while time.monotonic() - gone < STORE_IS_GONE_S:
            answer = nodes.app.client.generate(prompt, temperature=0.0, max_tokens=40)
            nodes.app.reference.check(prompt, answer.token_ids, label="without a store")
        nodes.cluster.head_node.start_gcs_server()
        nodes.wait_for_targets()
        os.kill(next(iter(nodes.app.drafters().values())), signal.SIGKILL)
        wait_until(lambda: not is_even(nodes.app), HANG_GUARD_S, "its end is known")
        wait_until(lambda: is_even(nodes.app), LOADED_WITHIN_S, "another in its place")
    assert {of: nodes_of(of) for of in before} == before, "nobody was replaced"
    all_draft(nodes.app)


def test_the_node_of_a_pools_drafter_goes_and_another_drafts_on(nodes: Nodes) -> None:
    wait_until(lambda: is_even(nodes.app), LOADED_WITHIN_S, "a drafter each")
    lost, (bereft,) = next(iter(ask_registry(nodes.app, "drafters").items()))
    epoch = ask_registry(nodes.app, "links")[bereft].epoch
    with load(nodes.app):
        nodes.remove(nodes_of("DrafterPool")[lost.split(":")[1]])

        def has_another() -> bool:
            with suppress(ValueError, KeyError, ray.exceptions.RayError):  # it may not know of it yet
                link = ask_registry(nodes.app, "links")[bereft]
                return bool(link.state == "up" and link.epoch > epoch)
            return False

        gone = time.monotonic()
        wait_until(has_another, HANG_GUARD_S, "a link in place of the lost one")
        print(f"linked to another drafter {time.monotonic() - gone:.1f} s after the node")
        wait_until(lambda: shares(nodes.app) == [2], HANG_GUARD_S, "the other drafts for both")
    all_draft(nodes.app)


def test_a_drained_node_s_drafter_hands_over_before_it_ends(nodes: Nodes) -> None:
    """Its target is linked to another one first: it is never without a link."""
    nodes.add("drafter")
    wait_until(lambda: is_even(nodes.app), LOADED_WITHIN_S, "a drafter each")
    name, (moving,) = next(iter(ask_registry(nodes.app, "drafters").items()))
    old = name.split(":")[1]
    drained = nodes_of("DrafterPool")[old]
    nodes.add("drafter")
    with load(nodes.app):
        nodes.drain(drained)

        def has_gone() -> bool:
            link = ask_registry(nodes.app, "links")[moving]
            assert link.state == "up", link
            return old not in nodes_of("DrafterPool")

        wait_until(has_gone, LOADED_WITHIN_S, "the old drafter's end")
        wait_until(lambda: is_even(nodes.app), LOADED_WITHIN_S, "a drafter each again")
    assert drained not in nodes_of("DrafterPool").values()
    all_draft(nodes.app)
    nodes.remove(drained)


def test_a_drained_node_s_replica_has_one_elsewhere_first_and_ends_no_answer(nodes: Nodes) -> None:
    old, drained = nodes.a_target()
    spare = nodes.add("target")
    with load(nodes.app):
        nodes.drain(drained)
        announced = time.monotonic()

        def counts() -> bool:
            running = nodes_of("Target")
            if old in running:
                return False
            assert spare in running.values(), "the old one left before there was another"
            return True

        wait_until(counts, LOADED_WITHIN_S, "the old replica's end")
        print(f"moved to another node {time.monotonic() - announced:.1f} s after it was announced")
        nodes.wait_for_targets()
    assert drained not in nodes_of("Target").values()
    nodes.remove(drained)
