"""An application on two hosts, this machine and one made of namespaces (cluster/wire.py), with a Ray node each."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import psutil
import pytest
from ray.cluster_utils import Cluster

from outrider.actors.serve_adapter import SERVE_ENVIRONMENT
from outrider.cluster.config import parse_config
from outrider.cluster.drafter_registry import LinkReport
from outrider.deploy.ports import pick_free_port
from tests.support.cluster.clusters import served_on
from tests.support.cluster.pools import MAX_TOKENS, PROMPT, ask_registry, by_target
from tests.support.cluster.serving import Deployment, Models, wait_until
from tests.support.cluster.wire import HERE, THERE, Host
from tests.support.load.traffic import Traffic

LOADED_WITHIN_S = 300.0
LINK_DEADLINE_S = 5.0
"""The default."""

GIVES_NODES_UP = {"RAY_health_check_timeout_ms": "3000"}
"""Ray gives a node up after five such times and five pauses of 3 s, as in deploy/kubernetes."""

OTHER_HOST = {"host": "other"}


@dataclass
class Hosts:
    app: Deployment
    cluster: Cluster
    other: Host

    @contextmanager
    def node(self) -> Iterator[None]:
        """Run a node on the other host, with room for an engine."""
        command = [*self.other.prefix, sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
        options = {
            "address": self.cluster.address,
            "node-ip-address": THERE,
            "num-cpus": 4,
            "labels": ",".join(f"{name}={value}" for name, value in OTHER_HOST.items()),
            "object-store-memory": 150 << 20,
        }
        given = [f"--{name}={value}" for name, value in options.items()]
        process = subprocess.Popen([*command, *given], stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
        self._entered = psutil.Process(process.pid)
        try:
            yield
        finally:
            its = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
            for each in (process, *its):
                with suppress(psutil.NoSuchProcess):
                    each.kill()
            process.wait()

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

    def count(self, name: str) -> float:
        (value,) = by_target(self.app, name).values()
        return value

    @contextmanager
    def streams(self) -> Iterator[list[Traffic]]:
        """Run two streams at a time, whose answers are checked."""
        with ExitStack() as stack:
            yield [stack.enter_context(Traffic(self.app, PROMPT, MAX_TOKENS)) for _ in range(2)]


@contextmanager
def served_on_hosts(models: Models, **deployment: Any) -> Iterator[Hosts]:
    """Serve an application whose ingress is here; what needs a role of its node has a node on the other host."""
    ports = {"gateway": "off", "grpc_port": pick_free_port(), "http_port": pick_free_port()}
    serving = {**ports, **deployment.pop("serving", {})}
    config = parse_config({**deployment, "serving": serving})
    assert config.link.link_deadline_ms == 1000 * LINK_DEADLINE_S
    head = {"num_cpus": 4, "include_dashboard": False, "node_ip_address": HERE}
    with pytest.MonkeyPatch.context() as environment, Host() as other:
        for name, value in {**SERVE_ENVIRONMENT, **GIVES_NODES_UP}.items():
            environment.setenv(name, value)
        cluster = Cluster(True, head_node_args=head)
        with served_on(cluster, config, models) as app:
            hosts = Hosts(app, cluster, other)
            with hosts.node():
                wait_until(app.all_replicas_are_known, LOADED_WITHIN_S, "the target", every_s=0.5)
                yield hosts
