"""An application on a cluster of the test's own, of several nodes on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray._common.utils import reset_ray_address
from ray._private.utils import read_ray_address
from ray.cluster_utils import Cluster

from outrider.cluster.config import OutriderConfig
from outrider.cluster.placement import NAMESPACE
from outrider.deploy.app import build_app, plan_replica
from outrider.deploy.client.sync_client import OutriderClient
from outrider.deploy.server import proxy_options
from tests.support.cluster.serving import Deployment, Models, actor_table
from tests.support.models.reference import Reference


@contextmanager
def served_on(cluster: Cluster, config: OutriderConfig, models: Models) -> Iterator[Deployment]:
    """Send the application, which may wait for nodes yet. The cluster ends with the block."""
    try:
        ray.init(cluster.address, namespace=NAMESPACE, log_to_driver=False)
        serve.start(proxy_location="HeadOnly", **proxy_options(config.serving))
        plan = plan_replica(config)
        built = serve.RunTarget(build_app(config, plan), name=config.serving.app_name, route_prefix="/")
        serve.run_many([built], wait_for_applications_running=False)
        app = _deployment(config, plan, models)
        yield app
        app.client.close()
        serve.shutdown()
    finally:
        address = cluster.address
        ray.shutdown()
        cluster.shutdown()
        # Its nodes leave the address in a file, and Ray's command line would go on asking a cluster that has ended.
        if read_ray_address() == address:
            reset_ray_address()


def nodes_of(deployment: str) -> dict[str, str]:
    """Return the node of each replica."""
    return {name.split("#")[2]: node for name, node in actor_nodes().items() if f"#{deployment}#" in name}


def actor_nodes() -> dict[str, str]:
    """Return the node of each living actor that has a name."""
    return {actor.name: actor.address.node_id.hex() for actor in actor_table() if actor.name}


def _deployment(config: OutriderConfig, plan: Any, models: Models) -> Deployment:
    address = f"127.0.0.1:{config.serving.grpc_port}"
    models_of = config.target.model, getattr(config.drafter, "model", config.target.model)
    references = [Reference(Path(model)) for model in models_of]
    url = f"http://127.0.0.1:{config.serving.http_port}"
    return Deployment("nodes", config, plan, address, OutriderClient(address), *references, url, models, Reference)
