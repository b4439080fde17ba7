"""Ray, Serve's proxies as configured, and the ingress before the stand-in target of the ingress' own tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray import serve

from outrider.actors.serve_seam import PROXY_ENVIRONMENT
from outrider.actors.serve_seam.broadcast import broadcast
from outrider.actors.serve_seam.options import proxy_options
from outrider.actors.serving.access.settings import VARIABLE, ProxyAccess
from outrider.actors.serving.http.app import Front
from outrider.cluster.config import ServingConfig
from outrider.cluster.limits import LIMITS_VARIABLE, LimitsConfig
from outrider.deploy.ports import pick_free_port
from outrider.deploy.probe import Probe
from tests.integration.ingress.stand_in_target import K, stand_in_target
from tests.serving import wait_until

MODEL = "pair"


@dataclass(frozen=True)
class Server:
    serving: ServingConfig
    meeting_point: Path
    """Where the stand-in target and a test leave files for each other."""

    @property
    def grpc_address(self) -> str:
        return f"127.0.0.1:{self.serving.grpc_port}"

    @property
    def url(self) -> str:
        return f"{'https' if self.serving.ssl_certfile else 'http'}://127.0.0.1:{self.serving.http_port}"


@contextmanager
def served(meeting_point: Path, limits: LimitsConfig | None = None, **settings: Any) -> Iterator[Server]:
    """settings: keys of ``serving``."""
    limits = limits or LimitsConfig()
    serving = ServingConfig(grpc_port=pick_free_port(), http_port=pick_free_port(), **settings)
    access = ProxyAccess.of(serving)
    before = {name: os.environ.get(name) for name in (VARIABLE, LIMITS_VARIABLE, *PROXY_ENVIRONMENT)}
    os.environ.update({**PROXY_ENVIRONMENT, **access.environment(), **limits.to_environment()})
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=128 << 20)
    try:
        serve.start(**proxy_options(serving, limits))
        front = serve.deployment(Front, name="Ingress", max_ongoing_requests=100)
        app = front.bind(
            stand_in_target(str(meeting_point)),
            MODEL,
            K,
            broadcast=broadcast,
            docs=serving.docs,
            keys_file=access.keys_file,
            isolates_tenants=serving.tenant_isolation,
        )
        serve.run(app, name="outrider")
        probe = Probe(serving)
        wait_until(lambda: probe.missing() is None, 60, "an answer from both ports")
        probe.check()
        yield Server(serving, meeting_point)
    finally:
        serve.shutdown()
        ray.shutdown()
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
