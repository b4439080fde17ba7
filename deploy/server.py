"""Starts, watches and stops one Outrider application on a Ray cluster: its own, or the one that RAY_ADDRESS names."""

from __future__ import annotations

import asyncio
import http.client
import logging
import os
import secrets
import socket
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve.config import HTTPOptions, gRPCOptions
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview

from outrider.actors.serve_adapter import GRPC_HOST_VARIABLE, REFLECTION, SERVE_ENVIRONMENT, SERVICES
from outrider.actors.serve_adapter.broadcast import broadcast
from outrider.actors.serving.authentication import TOKEN_VARIABLE
from outrider.cluster.config import ConfigError, OutriderConfig, ServingConfig
from outrider.cluster.installed import import_early
from outrider.cluster.registry import find_registry
from outrider.deploy import ray_access
from outrider.deploy.app import INGRESS, POOL, ReplicaPlan, build_app, describe, plan_replica, serve_logging
from outrider.deploy.gateway import Gateway
from outrider.deploy.liveness import (
    UNSCHEDULED,
    ApplicationHealth,
    ServerDied,
    all_serve,
    explain_failure,
    has_come_up,
    has_failed,
    has_given_up,
    shortened,
    states,
)
from outrider.deploy.ports import reachable
from outrider.deploy.processes import StopSignal, adopt_orphans, descendants, end_descendants, remove_shared_memory
from outrider.deploy.progress import Progress
from outrider.deploy.ray_cluster import start_ray

REPORT_EVERY_S = 60.0
LOOK_EVERY_S = 10.0
BEAT_S = 3.0
ASKING_TO_DRAIN_S = 5.0
DRAIN_EVERY_S = 0.5
TROUBLES_WITHIN_S = 5.0
SERVE_SHUTDOWN_S = 45.0
RAY_SHUTDOWN_S = 20.0

RAY_DAEMONS = ("gcs_server", "raylet")


class Server:
    """Runs one application. Call ``start``, ``wait`` and ``stop`` once each, from the main thread."""

    def __init__(self, config: OutriderConfig, stop: StopSignal, progress: Progress, verbose: bool = False) -> None:
        self._config, self._serving, self._name = config, config.serving, config.serving.app_name
        self._host = reachable(config.serving.host)
        self._stop = stop
        self._progress = progress
        self._verbose = verbose
        self._address = os.environ.get("RAY_ADDRESS")
        self._pids: set[int] = set()
        """Ids of all descendants of this process, seen so far."""

        self._logs: Path | None = None
        self._daemons: dict[int, str] = {}
        self._stopped_asking = threading.Event()
        self._looks_at = 0.0
        self._gateway: Gateway | None = None
        self._serves = False

    def start(self) -> None:
        """Returns when requests can be answered. Raises ConfigError, or Stopped at a signal."""
        plan = plan_replica(self._config)
        for warning in plan.warnings:
            self._progress.say(f"WARNING: {warning}")
        adopt_orphans()
        # Importing the replica's class loads vLLM, which takes seconds that starting Ray leaves idle.
        import_early("outrider.actors.serving.replica")
        self._start_ray(plan)
        self._progress.say(f"deploying {describe(self._config)}")
        if self._serving.gateway != "off":
            os.environ.setdefault(TOKEN_VARIABLE, secrets.token_hex(32))
        app = build_app(self._config, plan)
        self._start_serve()
        serve.run_many([serve.RunTarget(app, name=self._name, route_prefix="/")], wait_for_applications_running=False)
        self._wait_until_running()
        if self._serving.gateway != "off":
            http, grpc = (self._host, self._serving.http_port or 0), (self._host, self._serving.grpc_port or 0)
            self._gateway = Gateway(self._serving.gateway, os.environ[TOKEN_VARIABLE], http, grpc)
            self._gateway.start()
        while (lacks := self._lacks()) is not None:
            self._progress.wait("waiting for the first answer", f"({lacks})")
            self._stop.wait(0.2)
        self._serves = True

    def wait(self) -> None:
        """Blocks until a signal (Stopped), or until Ray, Serve or the application ends by itself (ServerDied)."""
        health = ApplicationHealth()
        arguments = (self._application_state, self._stopped_asking)
        threading.Thread(target=health.keep_asking, args=arguments, daemon=True).start()
        while True:
            self._check_lives(health)
            self._stop.wait(BEAT_S)

    def _check_lives(self, health: ApplicationHealth) -> None:
        """Raises ServerDied for the first part that has ended, or Stopped at a signal."""
        died = next((f"Ray's {name} has ended" for name in self._ended_daemons()), health.failure())
        if self._gateway is not None and not self._gateway.alive():
            died = "the gateway (HAProxy) has ended"
        if died is not None:
            self._stop.wait(0.5)  # a signal to the whole process group ends them, too
            raise ServerDied(f"{died}{self._where()}")

    def _ended_daemons(self) -> list[str]:
        """Returns the names of the daemons of our own Ray that have ended."""
        alive = {process.pid for process in descendants()}
        self._pids |= alive
        return [name for pid, name in self._daemons.items() if pid not in alive]

    def _application_state(self) -> tuple[bool, bool, str]:
        """Asks Serve's controller whether the application exists, whether it serves, and for its messages."""
        app = serve.status().applications.get(self._name)
        if app is None or app.status is ApplicationStatus.DELETING:
            return False, False, "somebody else took it down"
        self._report_troubles(app)
        said = [app.status.value, app.message, *(each.message for each in app.deployments.values())]
        return True, app.status is ApplicationStatus.RUNNING or all_serve(app), " ".join(said)

    def stop(self) -> list[str]:
        """Ends everything that was started. Returns one line for each process that could not be ended."""
        self._stopped_asking.set()
        if ray.is_initialized():
            if self._serves and not self._ended_daemons():
                self._within(self._serving.drain_s + 3 * ASKING_TO_DRAIN_S, self._drain)
            if not self._within(SERVE_SHUTDOWN_S, self._take_down_serve):
                self._progress.say("Ray is gone already or does not answer; ending its processes")
            self._within(RAY_SHUTDOWN_S, ray.shutdown)
        if self._gateway is not None:
            self._gateway.stop()
        left = end_descendants(grace_s=5.0)
        remove_shared_memory(self._pids)
        return left

    def _within(self, limit_s: float, call: Callable[[], object]) -> bool:
        """Runs a call in a thread for limit_s at most, and for 3 s at most once Ray has ended. Returns whether it
        ended."""

        def quietly() -> None:
            with suppress(Exception):
                call()

        thread = threading.Thread(target=quietly, daemon=True)
        limit = time.monotonic() + limit_s
        thread.start()
        while thread.is_alive() and time.monotonic() < limit:
            thread.join(0.5)
            if self._ended_daemons():
                thread.join(3.0)
                break
        return not thread.is_alive()

    def _drain(self) -> None:
        """Waits for running requests, until serving.drain_s is over or another signal comes."""
        ingress = serve.get_deployment_handle(INGRESS, self._name)

        def running() -> int:
            replies = asyncio.run(broadcast(ingress, "drain", timeout_s=ASKING_TO_DRAIN_S))
            # The requests of an ingress that does not reply cannot be waited for.
            return sum(reply.value for reply in replies if reply.ok)

        if self._gateway is not None:  # it takes no new connection from now on
            threading.Thread(target=self._gateway.drain, args=(self._serving.drain_s,), daemon=True).start()
        limit = time.monotonic() + self._serving.drain_s
        while left := running():
            rest_s = max(0.0, limit - time.monotonic())
            self._progress.wait("requests running:", f"{left}; waiting {rest_s:.0f} s at most, until another signal")
            if not rest_s or self._stop.pressed(min(DRAIN_EVERY_S, rest_s)):
                self._progress.say(f"requests ended unfinished: {left}")
                return

    def _start_ray(self, plan: ReplicaPlan) -> None:
        proxies = {**SERVE_ENVIRONMENT, GRPC_HOST_VARIABLE: self._serving.host}
        os.environ.update({"RAY_USAGE_STATS_ENABLED": "0", "VLLM_NO_USAGE_STATS": "1", **proxies})
        if not self._verbose:
            warnings.filterwarnings("ignore")
            logging.getLogger("ray.serve").setLevel(logging.WARNING)
        self._progress.say(f"connecting to Ray at {self._address}" if self._address else "starting Ray")
        drafter = self._config.remote_drafter
        needed = plan.total("CPU", self._serving.most_replicas, drafter.most_drafters if drafter is not None else 0)
        self._logs = start_ray(needed, self._progress.say, address=self._address, dashboard=True, verbose=self._verbose)
        if not self._address:
            self._daemons = {each.pid: name for each in descendants() if (name := each.name()) in RAY_DAEMONS}
        self._stop.install()
        self._progress.say(f"Ray is up{self._where()}")
        for said in ray_access.secured(os.environ, self._address):
            self._progress.say(said)

    def _start_serve(self) -> None:
        location = "EveryNode" if self._address else "HeadOnly"
        options = {**proxy_options(self._serving), "logging_config": serve_logging(self._serving)}
        try:
            serve.start(proxy_location=location, **options)
        except (RuntimeError, TimeoutError) as error:
            raise ConfigError(f"serving: Ray Serve did not start: {shortened(str(error))}{self._where()}") from error

    def _wait_until_running(self) -> None:
        """Returns when all deployments run; the pool of drafters is not waited for. Raises ConfigError."""
        while True:
            app = serve.status().applications.get(self._name)
            if app is not None:
                self._report_troubles(app)
                if has_come_up(app):
                    if app.status is not ApplicationStatus.RUNNING:
                        self._progress.say("drafters of the pool still load: targets decode plainly until one is there")
                    return
                if has_given_up(app):
                    raise ConfigError(f"{explain_failure(app)}{self._where()}")
            self._ended_daemons()
            self._progress.wait("loading:", states(app))
            self._stop.wait(0.5)

    def _lacks(self) -> str | None:
        """Returns what keeps a client from being answered, or None. Serve's proxies learn of a replica with a delay."""
        try:
            socket.create_connection((self._host, self._serving.grpc_port or 0), timeout=10.0).close()
            connection = http.client.HTTPConnection(self._host, self._serving.http_port, timeout=10.0)
            connection.request("GET", "/health")
            status = connection.getresponse().status
            connection.close()
        except (OSError, http.client.HTTPException) as error:
            return str(error) or type(error).__name__
        return None if status == http.client.OK else f"/health answers {status}"

    def _report_troubles(self, app: ApplicationStatusOverview) -> None:
        """Repeats, once a minute, why replicas of the application are missing though the server goes on."""
        now = time.monotonic()
        if now < self._looks_at:
            return
        troubles = [(POOL, trouble) for trouble in self._drafter_troubles()] if POOL in app.deployments else []
        for name, each in app.deployments.items():
            if UNSCHEDULED in each.message or (name == POOL and has_failed(each)):
                troubles.append((name, shortened(each.message)))
        for name, text in troubles:
            self._progress.say(f"WARNING: {name}: {text}")
        self._looks_at = now + (REPORT_EVERY_S if troubles else LOOK_EVERY_S)

    def _drafter_troubles(self) -> list[str]:
        """Returns why drafters of the pool do not load. Their replicas try again without failing, so Serve does not
        know."""
        try:
            registry = find_registry(self._name)
            return sorted(set(ray.get(registry.troubles.remote(), timeout=TROUBLES_WITHIN_S).values()))
        except (ray.exceptions.RayError, ValueError):  # there is no registry yet, or it is being replaced
            return []

    def _where(self) -> str:
        return f" (logs: {self._logs}; shown with --verbose)" if self._logs is not None else ""

    def _take_down_serve(self) -> None:
        # delete() ends the replicas gracefully. In a cluster of ours the rest ends with Ray; serve.shutdown() would
        # sometimes wait for 30 seconds for the controller that it has killed itself.
        serve.delete(self._name)
        if self._address and not serve.status().applications:
            serve.shutdown()


def proxy_options(serving: ServingConfig) -> dict[str, Any]:
    """Returns ``http_options`` and ``grpc_options`` for ``serve.start``. The ports must be settled."""
    functions = [SERVICES, REFLECTION] if serving.api_key is None else [SERVICES]
    assert serving.grpc_port is not None
    return {
        "http_options": HTTPOptions(host=serving.host, port=serving.http_port, keep_alive_timeout_s=300),
        "grpc_options": gRPCOptions(port=serving.grpc_port, grpc_servicer_functions=functions, enable_reflection=False),
    }
