"""The machine of a cluster's head is lost for good, under load, with all that ran there: GCS, Serve's controller, a
proxy and the registry. Another one begins at its address from the store that GCS had, which outlives it: Ray's own, in
files that the next machine has, or a Redis. The head is on a host of its own (support/cluster/wire.py), all else here.
How GCS alone goes and comes back: test_nodes.py.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import ray

from outrider.actors.serve_adapter import SERVE_ENVIRONMENT
from outrider.cluster.config import parse_config
from outrider.deploy.ports import pick_free_port
from tests.support.cluster.clusters import actor_nodes, served_on
from tests.support.cluster.hosts import GIVES_NODES_UP, LOADED_WITHIN_S
from tests.support.cluster.processes import PROXY, counted
from tests.support.cluster.serving import HANG_GUARD_S, Deployment, Models, engine, wait_until
from tests.support.cluster.wire import HERE, THERE, Host, can_make_hosts
from tests.support.load.faulted import REPLACED_WITHIN_S, Faulted, check_all_is_well

pytestmark = [
    pytest.mark.engine,
    pytest.mark.exhaustive,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not can_make_hosts(), reason="no right to make namespaces"),
]

WITHOUT_HEAD_S = 10.0
PATIENCE = {"RAY_gcs_rpc_server_reconnect_timeout_s": "240"}
"""How long nodes wait for another head: 60 s by default."""

PORT = 6379
BOTH = "198.18.7.0/29"
"""Their addresses, and more than the wire's network."""

WORKER = {"role": "worker"}
INGRESS_OPTIONS = {"num_cpus": 0, "label_selector": WORKER}


@dataclass(frozen=True)
class Store:
    """Tells the head where GCS keeps its state."""

    environment: Mapping[str, str]
    options: Sequence[str] = ()


@contextmanager
def rocksdb(directory: Path) -> Iterator[Store]:
    yield Store({"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(directory)})


@contextmanager
def redis(directory: Path) -> Iterator[Store]:
    """Run a Redis, and name it as KubeRay does (gcsFaultToleranceOptions)."""
    port, password = pick_free_port(), "of-the-store"
    settings = {"port": port, "bind": HERE, "requirepass": password, "appendonly": "yes", "dir": directory}
    command = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    process = subprocess.Popen(["redis-server", *command], stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: _listens(HERE, port), HANG_GUARD_S, "a store", every_s=0.2)
        environment = {"RAY_REDIS_ADDRESS": f"{HERE}:{port}", "REDIS_PASSWORD": password}
        yield Store({**environment, "RAY_external_storage_namespace": "a-cluster"}, [f"--redis-password={password}"])
    finally:
        process.kill()
        process.wait()


class HostedHead:
    """A cluster whose head is on a host of its own, without processors, and whose other node is here."""

    address = f"{THERE}:{PORT}"

    def __init__(self, store: Store) -> None:
        self._store = store
        self._ends = ExitStack()

    def start(self) -> None:
        """Start a head on a machine that has nothing of a former head's but the address."""
        self._host = Host()
        self._host.__enter__()
        self._head = _ray_start(
            "--head", f"--port={PORT}", f"--node-ip-address={THERE}", "--num-cpus=0", "--include-dashboard=false",
            *self._store.options, prefix=self._host.prefix, environment=self._store.environment,
        )  # fmt: skip
        wait_until(lambda: _listens(THERE, PORT), HANG_GUARD_S, "a head", every_s=0.2)

    def lose(self) -> None:
        """End the head like a machine whose power is cut."""
        self._host.__exit__(None, None, None)
        self._head.wait()

    def add_node(self) -> None:
        labels = ",".join(f"{name}={value}" for name, value in WORKER.items())
        options = f"--address={self.address}", f"--node-ip-address={HERE}", "--num-cpus=4", f"--labels={labels}"
        self._ends.callback(_end, _ray_start(*options))
        # A driver here, which begins before, would be one of the head's.
        gcs = ray._raylet.GcsClient(address=self.address)
        wait_until(lambda: len(gcs.get_all_node_info()) == 2, HANG_GUARD_S, "a node here", every_s=0.2)

    def shutdown(self) -> None:
        self._ends.close()
        self.lose()


def _ray_start(
    *options: str, prefix: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    command = [*prefix, sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *options]
    return subprocess.Popen(
        [*command, f"--object-store-memory={150 << 20}"],
        env={**os.environ, **(environment or {})}, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT,
    )  # fmt: skip


def _listens(host: str, port: int) -> bool:
    with suppress(OSError), socket.create_connection((host, port), 1):
        return True
    return False


def _end(process: subprocess.Popen[bytes]) -> None:
    its = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    for each in (process, *its):
        with suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait()


@contextmanager
def addresses_of_both_hosts() -> Iterator[None]:
    """This one's would go with the wire to the other host else, and what runs here could not talk to itself. The other
    is nowhere while there is no such host: in the network outside somebody might answer for it."""
    address = [f"{HERE}/32", "dev", "lo"]
    nowhere = ["unreachable", BOTH]  # the wire is nearer, where there is one
    subprocess.run(["ip", "addr", "add", *address], check=True)
    subprocess.run(["ip", "route", "add", *nowhere], check=True)
    try:
        yield
    finally:
        subprocess.run(["ip", "route", "del", *nowhere], check=True)
        subprocess.run(["ip", "addr", "del", *address], check=True)


def _is_served(app: Deployment) -> bool:
    """Return whether the proxy here serves, which comes with the first replica."""
    with suppress(OSError):
        return app.all_replicas_are_known()
    return False


@dataclass
class Headed:
    app: Deployment
    cluster: HostedHead

    def there(self) -> list[str]:
        """Living nodes' addresses."""
        return sorted(node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"])

    def heads(self) -> set[str]:
        """Ids of the living nodes there: one, or none while another begins."""
        return {node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeManagerAddress"] == THERE}

    def on_the_head(self) -> list[str]:
        """Return the actors on the head, by the beginning of their names."""
        heads = self.heads()
        return sorted(re.split("[:-]", name)[0] for name, node in actor_nodes().items() if node in heads)


NEEDS_REDIS = pytest.mark.skipif(shutil.which("redis-server") is None, reason="no redis-server")


@pytest.fixture(params=[rocksdb, pytest.param(redis, marks=NEEDS_REDIS)])
def headed(models: Models, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Headed]:
    config = parse_config(
        {
            "target": engine(models.target, max_num_seqs=4, node_labels=WORKER),
            "drafter": {"method": "ngram", "node_labels": WORKER},
            "speculation": {"num_speculative_tokens": 8, "adaptive": False},
            "serving": {"gateway": "off", "grpc_port": pick_free_port(), "http_port": pick_free_port()},
        }
    )
    with pytest.MonkeyPatch.context() as environment, addresses_of_both_hosts(), request.param(tmp_path) as store:
        for name, value in {**SERVE_ENVIRONMENT, **GIVES_NODES_UP, **PATIENCE}.items():
            environment.setenv(name, value)
        environment.setenv("RAY_AUTH_MODE", "disabled")  # Ray's command line makes a token else
        cluster = HostedHead(store)
        cluster.start()
        cluster.add_node()
        with served_on(cluster, config, models, "EveryNode", INGRESS_OPTIONS, HERE) as app:
            wait_until(lambda: _is_served(app), LOADED_WITHIN_S, "the target", every_s=0.5)
            wait_until(lambda: counted(app)[PROXY] == 2, LOADED_WITHIN_S, "both proxies", every_s=0.5)
            yield Headed(app, cluster)


def test_another_head_goes_on_from_the_store_and_no_answer_is_lost(headed: Headed) -> None:
    app = headed.app
    link, on_the_head, replicas = app.linked(), headed.on_the_head(), (app.replicas(), app.replicas("Ingress"))
    heads = headed.heads()
    with Faulted(app) as fault:
        headed.cluster.lose()
        lost = time.monotonic()
        while time.monotonic() - lost < WITHOUT_HEAD_S:
            fault.clients.wait_for_answers()
        headed.cluster.start()
        # Until then GCS says what its store has: the lost head lives, and all that was there.
        wait_until(lambda: headed.heads() - heads, HANG_GUARD_S, "the other head is known", every_s=0.2)
        fault.whole_again()
        print(f"whole again {time.monotonic() - lost:.1f} s after the head was lost")
        assert headed.there() == [HERE, THERE]
        assert headed.on_the_head() == on_the_head
    fault.check(cut=False)
    assert (app.replicas(), app.replicas("Ingress")) == replicas
    assert app.linked().epoch == link.epoch

    app.signal_drafter(signal.SIGKILL)
    app.linked(epoch_after=link.epoch)
    ((old, replica),) = app.replicas().items()
    os.kill(replica, signal.SIGKILL)
    wait_until(lambda: old not in app.replicas(), HANG_GUARD_S, "its end is known")
    wait_until(lambda: app.replicas() and app.all_replicas_are_known(), REPLACED_WITHIN_S, "another", every_s=0.5)
    check_all_is_well(app)
