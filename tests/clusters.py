"""An application on a cluster of the test's own, of several nodes on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Protocol

import ray
import yaml
from ray import serve
from ray.autoscaler._private.fake_multi_node.node_provider import (
    FAKE_HEAD_NODE_ID,
    FAKE_HEAD_NODE_TYPE,
    FakeMultiNodeProvider,
)
from ray.core.generated import gcs_pb2

from outrider.cluster.config import OutriderConfig
from outrider.cluster.link.keeper import LOOPBACK
from outrider.cluster.placement import NAMESPACE
from outrider.deploy.app import build_app, plan_replica
from outrider.deploy.client.sync_client import OutriderClient
from outrider.deploy.server import proxy_options
from tests.reference import Reference
from tests.serving import Deployment, Models

_COMMANDS = (
    "initialization_commands",
    *(f"{of}setup_commands" for of in ("", "head_", "worker_")),
    *(f"{of}_start_ray_commands" for of in ("head", "worker")),
)
"""Of the autoscaler's configuration, each of which it wants to be there."""


class Autoscaled:
    """A head without processors, and Ray's own autoscaler, which adds nodes of this machine and takes them away. For a
    machine of its own (tests/wire.py): ports are Ray's usual ones."""

    def __init__(self, directory: Path, node_types: dict[str, Any], idle_s: float) -> None:
        """node_types: as ``available_node_types`` of a cluster's YAML has them; those of the head are added."""
        self.address = f"{LOOPBACK}:6379"
        head = {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0}
        config = {
            "cluster_name": "scaled",
            "max_workers": sum(each["max_workers"] for each in node_types.values()),
            "idle_timeout_minutes": idle_s / 60,
            # By its own name the autoscaler looks for an example file that Ray's package lacks.
            "provider": {
                "type": "external",
                "module": f"{FakeMultiNodeProvider.__module__}.{FakeMultiNodeProvider.__name__}",
                "head_node_id": FAKE_HEAD_NODE_ID,
                "gcs_address": self.address,
                "launch_multiple": True,
                "disable_node_updaters": True,
                "disable_launch_config_check": True,
            },
            "available_node_types": {**node_types, FAKE_HEAD_NODE_TYPE: head},
            "head_node_type": FAKE_HEAD_NODE_TYPE,
            "auth": {},
            "file_mounts": {},
            **{name: [] for name in (*_COMMANDS, "cluster_synced_files")},
        }
        path = directory / "autoscaling.yaml"
        path.write_text(yaml.safe_dump(config))
        ray_start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--num-cpus=0", "--port=6379"]
        subprocess.run(
            [*ray_start, f"--node-ip-address={LOOPBACK}", f"--autoscaling-config={path}", "--include-dashboard=false"],
            env={**os.environ, **self.ENVIRONMENT},
            check=True,
        )

    ENVIRONMENT: ClassVar = {
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "RAY_FAKE_CLUSTER": "1",
        "RAY_enable_autoscaler_v2": "1",
        "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID,
        "RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID,
    }

    def shutdown(self) -> None:
        """Nothing: it ends with its machine."""


class AnyCluster(Protocol):
    """Ray's own Cluster, Autoscaled, or one of a test's own."""

    @property
    def address(self) -> str: ...

    def shutdown(self) -> None: ...


@contextmanager
def served_on(
    cluster: AnyCluster,
    config: OutriderConfig,
    models: Models,
    proxy_location: str = "HeadOnly",
    ingress_options: dict[str, Any] | None = None,
    node_ip: str | None = None,
) -> Iterator[Deployment]:
    """The application is sent, and may wait for nodes yet. The cluster ends with the block. ingress_options: in place
    of its actor's, as Serve's own file has them. node_ip: of the node here, where it is not the head."""
    try:
        ray.init(cluster.address, namespace=NAMESPACE, log_to_driver=False, _node_ip_address=node_ip)
        serve.start(proxy_location=proxy_location, **proxy_options(config.serving))
        plan = plan_replica(config)
        application = build_app(config, plan)
        if ingress_options is not None:
            ingress = application._bound_deployment.options(ray_actor_options=ingress_options)
            application._bound_deployment = ingress
        built = serve.RunTarget(application, name=config.serving.app_name, route_prefix="/")
        serve.run_many([built], wait_for_applications_running=False)
        app = _deployment(config, plan, models)
        yield app
        app.client.close()
        serve.shutdown()
    finally:
        ray.shutdown()
        cluster.shutdown()


def nodes_of(deployment: str) -> dict[str, str]:
    """By replica: the node that it is on."""
    return {name.split("#")[2]: node for name, node in actor_nodes().items() if f"#{deployment}#" in name}


def actor_nodes() -> dict[str, str]:
    """By the name of each living actor that has one: the node that it is on."""
    table = ray._private.state.state._connect_and_get_accessor().get_actor_table(None, "ALIVE")
    actors = [gcs_pb2.ActorTableData.FromString(data) for data in table]
    return {actor.name: actor.address.node_id.hex() for actor in actors if actor.name}


def _deployment(config: OutriderConfig, plan: Any, models: Models) -> Deployment:
    address = f"127.0.0.1:{config.serving.grpc_port}"
    models_of = config.target.model, getattr(config.drafter, "model", config.target.model)
    references = [Reference(Path(model)) for model in models_of]
    url = f"http://127.0.0.1:{config.serving.http_port}"
    return Deployment("nodes", config, plan, address, OutriderClient(address), *references, url, models, Reference)
