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

from outrider.cluster.config import OutriderConfig
from outrider.cluster.placement import NAMESPACE
from outrider.deploy.app import build_app, plan_replica
from outrider.deploy.client.sync_client import OutriderClient
from outrider.deploy.server import proxy_options
from tests.support.cluster.serving import Deployment, Models, actor_table
from tests.support.models.reference import Reference


@contextmanager
def served_on(
    cluster: Any,
    config: OutriderConfig,
    models: Models,
    proxy_location: str = "HeadOnly",
    ingress_options: dict[str, Any] | None = None,
    node_ip: str | None = None,
) -> Iterator[Deployment]:
    """Send the application, which may wait for nodes yet. The cluster ends with the block.

    cluster: Ray's own, or one of a test's. ingress_options: of the ingress' actor. node_ip: of the node here, where it
    is not the head.
    """
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
