"""One Ray cluster (its own, or the one RAY_ADDRESS names) with one Outrider application on it, from start to end.

`explain` takes the one line that says why a start failed out of the tracebacks that Ray, Serve and vLLM wrap around it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
import re
import secrets
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import ray
from ray import serve
from ray.serve.config import HTTPOptions, gRPCOptions
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview, DeploymentStatusOverview

from outrider.actors.observability.start_up import stages_in
from outrider.actors.serve_seam import GRPC_HOST_VARIABLE, PROXY_ENVIRONMENT, REFLECTION, SERVICES
from outrider.actors.serve_seam.broadcast import broadcast
from outrider.actors.serve_seam.living import end_controller
from outrider.actors.serving.owners import TOKEN_VARIABLE
from outrider.cluster.config import ConfigError, EngineConfig, OutriderConfig, ServingConfig
from outrider.cluster.engine_args import Side, about
from outrider.cluster.installed import import_early
from outrider.cluster.placement import NAMESPACE
from outrider.cluster.registry import find_registry
from outrider.deploy import ray_access
from outrider.deploy.app import (
    INGRESS,
    POOL,
    TARGET,
    ReplicaPlan,
    build_app,
    describe,
    plan_replica,
    serve_logging,
)
from outrider.deploy.drain import drain
from outrider.deploy.gateway import Gateway
from outrider.deploy.liveness import ApplicationJudge, ApplicationState, ServerDied, keep_asking
from outrider.deploy.pending import PendingLog
from outrider.deploy.ports import reachable
from outrider.deploy.probe import missing
from outrider.deploy.processes import (
    SharedMemoryWatch,
    StopSignal,
    adopt_orphans,
    descendants,
    end_descendants,
    reap_orphans,
)
from outrider.deploy.progress import Progress

_ERROR = re.compile(r"^(?:[A-Za-z_]\w*\.)*(?P<type>[A-Za-z_]\w*(?:Error|Exception|Exit|Interrupt))(?:: (?P<text>.*))?$")
_LOG_PREFIX = re.compile(
    r"^(?:\x1b\[[\d;]*m)?(?:\([^)]*\)(?:\x1b\[[\d;]*m)?\s*)?(?:(?:ERROR|INFO|WARNING|CRITICAL)\s[\d: -]+\[[^\]]*\]\s?)?"
)
_END = re.compile(
    r'^\s*(?:For further information|\[type=|File ".*", line|Traceback|The above exception|During handling|$)'
)
_ELSEWHERE = re.compile(
    r"root cause above|Engine core initialization failed|WorkerProc initialization failed|died unexpectedly"
)

MOST_LINES = 4


OBJECT_STORE_BYTES = 256 << 20
"""Nothing large travels through Ray's object store: tokens are a few hundred bytes a round."""

BEAT_S = 3.0
NOTE_EVERY_BEATS = 5
ASKING_ENDS_WITHIN_S = 2.0
ASKING_TO_DRAIN_S = 5.0
ENDING_CONTROLLER_S = 5.0
SERVE_SHUTDOWN_S = 45.0
TROUBLES_WITHIN_S = 5.0
WORKER_NICENESS = ("RAY_worker_niceness", "0")
"""Ray runs its workers at 15 unless told otherwise, which is meant for batches: proxies, ranks and drafters would wait
for whatever else runs on their machine, their own clients included."""

TRIES_AGAIN = "A replica failed to start with exception."
"""How the message of a deployment begins whose replica Serve starts anew; nothing else of its status says so."""

CONTROLLER_TITLE = "ray::ServeController"
"""Of Serve's controller, among processes."""

RAY_DAEMONS = ("gcs_server", "raylet")
RAY_SHUTDOWN_S = 20.0
RAY_GONE_SHUTDOWN_S = 3.0

_FIELD = re.compile(r"(?:target|drafter|speculation|link|serving|limits)[.\w]*: ")


class Server:
    """start, wait, stop: once each, from the main thread."""

    def __init__(self, config: OutriderConfig, stop: StopSignal, progress: Progress, verbose: bool = False) -> None:
        self._config = config
        self._stop = stop
        self._progress = progress
        self._verbose = verbose
        self._address = os.environ.get("RAY_ADDRESS")
        self._shared_memory = SharedMemoryWatch()
        self._logs: Path | None = None
        self._daemons: dict[int, str] = {}
        self._asking: threading.Thread | None = None
        self._stopped_asking = threading.Event()
        self._stages_told: set[tuple[str, float]] = set()
        self._pool_troubles: set[str] = set()
        self._pool_message = ""
        self._pending = PendingLog(progress.say)
        self._gateway: Gateway | None = None
        self._serves = False

    def start(self) -> None:
        """Return when requests can be answered. Raises ConfigError, or Stopped when asked to end meanwhile."""
        ray_access.check(os.environ)
        plan = plan_replica(self._config)
        for warning in plan.warnings:
            self._progress.say(f"WARNING: {warning}")
        adopt_orphans()
        # Importing the replica's class loads vLLM, which takes seconds that starting Ray leaves idle.
        import_early("outrider.actors.serving.replica")
        with self._progress.stage("Ray started"):
            self._start_ray(plan)
        self._progress.say(f"deploying {describe(self._config)}")
        if self._config.serving.gateway != "off":
            os.environ.setdefault(TOKEN_VARIABLE, secrets.token_hex(32))
        app = build_app(self._config, plan)
        with self._progress.stage("Ray Serve started"):
            self._start_serve()
        serve.run_many(
            [serve.RunTarget(app, name=self._config.serving.app_name, route_prefix="/")],
            wait_for_applications_running=False,
        )
        with self._progress.stage("replicas up"):
            self._wait_until_running()
        self._start_gateway()
        with self._progress.stage("first answer"):
            self._wait_until_answering()
        self._serves = True

    def wait(self) -> None:
        """Return never; Stopped ends it. Raises ServerDied when Ray, Serve or the application has ended by itself."""
        judge = ApplicationJudge(self._config.serving.app_name)
        arguments = (self._application_state, judge, self._stopped_asking)
        self._asking = threading.Thread(target=keep_asking, args=arguments, daemon=True)
        self._asking.start()
        for beat in itertools.count():
            self._check_lives(judge)
            if judge.ends_controller():
                self._progress.say("WARNING: Serve's controller does not answer; ending it, for Ray to start another")
                _call(_end_controller, ENDING_CONTROLLER_S)
            if beat % NOTE_EVERY_BEATS == 0:
                # Processes that die early would take the knowledge of their shared memory with them.
                self._shared_memory.note()
            reap_orphans()
            self._stop.wait(BEAT_S)

    def _check_lives(self, judge: ApplicationJudge) -> None:
        """Raises ServerDied, or Stopped when asked to end meanwhile."""
        alive = {process.pid for process in descendants()}
        dead = next((f"Ray's {name}" for pid, name in self._daemons.items() if pid not in alive), None)
        if self._gateway is not None and not self._gateway.alive():
            dead = "the gateway (HAProxy)"
        died = judge.verdict() if dead is None else f"{dead} has ended"
        if died is not None:
            self._stop.wait(0.5)  # a signal to the whole process group ends them, too
            raise ServerDied(f"{died}{self._where()}")

    def _application_state(self) -> ApplicationState:
        """As Serve's controller says. Raises what Ray raises when it does not answer."""
        app = serve.status().applications.get(self._config.serving.app_name)
        if app is None:
            return ApplicationState(None, serves=False)
        self._tell_pool(app)
        self._pending.look(app.deployments)
        serves = app.status is ApplicationStatus.RUNNING or all_serve(app.deployments)
        message = app.message or next((each.message for each in app.deployments.values() if each.message), "")
        return ApplicationState(app.status.value, serves and bool(app.deployments), message)

    def stop(self) -> list[str]:
        """Take everything down. Returns one line per process that could not be ended."""
        self._stopped_asking.set()
        if self._asking is not None:
            self._asking.join(ASKING_ENDS_WITHIN_S)  # a call under way should not meet the end of Ray
        self._shared_memory.note()
        if ray.is_initialized():
            if self._serves and self._ray_lives():
                limit_s = self._config.serving.drain_s + 3 * ASKING_TO_DRAIN_S
                _call(self._drain, limit_s, while_true=self._ray_lives)
            if not _call(self._take_down_serve, SERVE_SHUTDOWN_S, while_true=self._ray_lives):
                self._progress.say("Ray is gone already or does not answer; ending its processes")
            _call(ray.shutdown, RAY_SHUTDOWN_S if self._ray_lives() else RAY_GONE_SHUTDOWN_S)
        if self._gateway is not None:
            self._gateway.stop()
        left = end_descendants(grace_s=5.0)
        for name in self._shared_memory.remove_theirs():
            self._progress.say(f"left /dev/shm/{name}: it may be another program's")
        return left

    def _drain(self) -> None:
        """Let running answers come to their ends, for serving.drain_s at most; a signal ends that, too."""
        ingress = serve.get_deployment_handle(INGRESS, self._config.serving.app_name)

        def ask() -> int:
            replies = asyncio.run(broadcast(ingress, "drain", timeout_s=ASKING_TO_DRAIN_S))
            # One that does not answer has nothing that could be waited for.
            return sum(reply.value for reply in replies if reply.ok)

        if self._gateway is not None:  # from now on it takes no new connection
            threading.Thread(target=self._gateway.drain, args=(self._config.serving.drain_s,), daemon=True).start()
        drain(ask, self._config.serving.drain_s, pressed=self._stop.pressed, say=self._progress.say)

    def _start_ray(self, plan: ReplicaPlan) -> None:
        proxies = {**PROXY_ENVIRONMENT, GRPC_HOST_VARIABLE: self._config.serving.host}
        os.environ.update({"RAY_USAGE_STATS_ENABLED": "0", "VLLM_NO_USAGE_STATS": "1", **proxies})
        os.environ.setdefault(*WORKER_NICENESS)
        if not self._verbose:
            warnings.filterwarnings("ignore")
            logging.getLogger("ray.serve").setLevel(logging.WARNING)
        level = logging.INFO if self._verbose else logging.ERROR
        if self._address:
            self._progress.say(f"connecting to Ray at {self._address}")
            ray.init(self._address, namespace=NAMESPACE, log_to_driver=self._verbose, logging_level=level)
        else:
            self._progress.say("starting Ray")
            needed = plan.total("CPU", self._config.serving.most_replicas, plan.most_drafters)
            # Logical: ranks that share cores still need a bundle each.
            num_cpus = max(os.cpu_count() or 1, math.ceil(needed))
            context = ray.init(**cluster_of_its_own(num_cpus), log_to_driver=self._verbose, logging_level=level)
            self._logs = Path(context.address_info["session_dir"]) / "logs"
            self._daemons = {each.pid: name for each in descendants() if (name := each.name()) in RAY_DAEMONS}
        self._stop.install()
        self._progress.say(f"Ray is up{self._where()}")
        for warning in ray_access.warnings(os.environ, self._address):
            self._progress.say(f"WARNING: {warning}")
        if (said := ray_access.keep_token_private(os.environ)) is not None:
            self._progress.say(said)
        if not self._address and os.environ.get(ray_access.AUTH_MODE) == "token":
            # Ray's own command line does not look for a token unasked.
            self._progress.say("see the actors with: RAY_AUTH_MODE=token ray list actors")

    def _start_serve(self) -> None:
        serving = self._config.serving
        try:
            serve.start(
                proxy_location="EveryNode" if self._address else "HeadOnly",
                **proxy_options(serving),
                logging_config=serve_logging(serving),
            )
        except (RuntimeError, TimeoutError) as error:
            raise ConfigError(f"serving: Ray Serve did not start: {explain(str(error))}{self._where()}") from error

    def _start_gateway(self) -> None:
        """Raises ConfigError."""
        serving = self._config.serving
        if serving.gateway == "off":
            return
        host = reachable(serving.host)
        assert serving.http_port is not None
        assert serving.grpc_port is not None
        backends = (host, serving.http_port), (host, serving.grpc_port)
        self._gateway = Gateway(serving.gateway, os.environ[TOKEN_VARIABLE], *backends, drain_s=serving.drain_s)
        self._gateway.start()
        self._progress.say("the gateway is up")

    def _wait_until_running(self) -> None:
        """But for a pool, without which targets serve. Raises ConfigError."""
        name = self._config.serving.app_name
        while True:
            app = serve.status().applications.get(name)
            self._tell_stages()
            if app is not None:
                self._tell_pool(app)
                self._pending.look(app.deployments)
                if has_come_up(app):
                    if app.status is not ApplicationStatus.RUNNING:
                        self._progress.say("drafters of the pool still load: targets decode plainly until one is there")
                    return
                if has_given_up(app):
                    raise ConfigError(self._explain_failure(app))
            self._shared_memory.note()
            self._progress.wait("loading:", _states(app))
            self._stop.wait(0.5)

    def _tell_pool(self, app: ApplicationStatusOverview) -> None:
        """What keeps drafters of the pool from being there, when that is another than before."""
        if POOL not in app.deployments:
            return
        self._tell_what_serve_says(app.deployments[POOL])
        try:
            registry = find_registry(self._config.serving.app_name)
            troubles: dict[str, str] = ray.get(registry.troubles.remote(), timeout=TROUBLES_WITHIN_S)
        except (ray.exceptions.RayError, ValueError):
            return  # the registry is not there yet, or is being replaced
        for text in sorted(set(troubles.values()) - self._pool_troubles):
            self._pool_troubles.add(text)
            self._progress.say(f"WARNING: {POOL}: {text}")

    def _tell_what_serve_says(self, pool: DeploymentStatusOverview) -> None:
        """Of a pool whose replicas do not even begin: those tell of themselves."""
        message = pool.message if has_failed(pool) else ""
        if message and message != self._pool_message:
            what = "has given up" if pool.status.name == "DEPLOY_FAILED" else "has trouble with"
            self._progress.say(f"WARNING: Serve {what} the pool of drafters: {explain(message, self._log_texts())}")
        self._pool_message = message

    def _wait_until_answering(self) -> None:
        """Asks the way a client does, since the proxies learn of a running replica only a moment later."""
        while (lacks := missing(self._config.serving)) is not None:
            self._progress.wait("waiting for the first answer", f"({lacks})")
            self._stop.wait(0.2)

    def _tell_stages(self) -> None:
        """What replicas have logged of their start-up since the last time."""
        if self._logs is None:
            return
        for path in sorted(self._logs.glob("serve/replica_*.log")):
            for stage, seconds in stages_in(path.read_text(errors="replace")):
                if (told := (f"{path.name} {stage}", seconds)) not in self._stages_told:
                    self._stages_told.add(told)
                    self._progress.done(stage, seconds)

    def _explain_failure(self, app: ApplicationStatusOverview) -> str:
        for name, deployment in app.deployments.items():
            if name != POOL and deployment.message and has_failed(deployment):
                text = explain(deployment.message, self._log_texts())
                field = "" if _FIELD.match(text) else f"{about(text, self._engine_args()) or name.lower()}: "
                return f"{field}{text}{self._where()}"
        return f"serving: {explain(app.message)}{self._where()}"

    def _engine_args(self) -> dict[Side, dict[str, Any]]:
        engines = (self._config.target, self._config.drafter)
        return {engine.side: engine.engine_args for engine in engines if isinstance(engine, EngineConfig)}

    def _log_texts(self) -> list[str]:
        """The ends of the workers' logs, newest first."""
        if self._logs is None:
            return []
        paths = [*self._logs.glob("worker-*.err"), *self._logs.glob("worker-*.out"), *self._logs.glob("serve/*.log")]
        paths.sort(key=lambda path: path.stat().st_mtime, reverse=True)
        return [path.read_text(errors="replace")[-65536:] for path in paths[:40]]

    def _where(self) -> str:
        return f" (logs: {self._logs})" if self._logs is not None else ""

    def _ray_lives(self) -> bool:
        """False when the daemons we started ended before us, as a signal to the whole process group makes them."""
        alive = {process.pid for process in descendants()}
        return all(pid in alive for pid in self._daemons)

    def _take_down_serve(self) -> None:
        # Ends the replicas gracefully. In a cluster of ours the rest goes down with Ray: serve.shutdown would kill its
        # controller while waiting for it, and now and then waits out its 30 seconds.
        serve.delete(self._config.serving.app_name)
        if self._address and not serve.status().applications:
            serve.shutdown()


def _end_controller() -> None:
    """Ours by its process: Ray starts another in the place of one that it is asked to end, but leaves one that is
    stopped where it is."""
    found = False
    for process in descendants():
        with suppress(psutil.NoSuchProcess):
            if CONTROLLER_TITLE in " ".join(process.cmdline()):
                process.kill()
                found = True
    if not found:  # of a cluster that others have started
        end_controller()


def all_serve(deployments: Mapping[str, DeploymentStatusOverview]) -> bool:
    """Whether each has a running replica, but for the pool: targets serve without drafters."""
    return all(
        any(getattr(state, "value", state) == "RUNNING" and count for state, count in each.replica_states.items())
        for name, each in deployments.items()
        if name != POOL
    )


def has_come_up(app: ApplicationStatusOverview) -> bool:
    """At start-up: whether everything runs, but for the pool."""
    if app.status is ApplicationStatus.RUNNING:
        return True
    if not {INGRESS, TARGET, POOL} <= app.deployments.keys():
        return False
    return all(_runs(each) for name, each in app.deployments.items() if name != POOL) and all_serve(app.deployments)


def _runs(deployment: DeploymentStatusOverview) -> bool:
    """As Serve counts it for the application: what autoscaling adds or takes away is not waited for."""
    is_scaled = deployment.status.name in ("UPSCALING", "DOWNSCALING")
    return deployment.status.name == "HEALTHY" or (
        is_scaled and deployment.status_trigger.name != "CONFIG_UPDATE_STARTED"
    )


def has_given_up(app: ApplicationStatusOverview) -> bool:
    """At start-up: whether something has failed, but for the pool."""
    failed = {name for name, each in app.deployments.items() if has_failed(each)}
    gave_up = app.status in (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY)
    return bool(failed - {POOL}) or (gave_up and not failed)


def has_failed(deployment: DeploymentStatusOverview) -> bool:
    """At start-up, where a wrong model or setting stays wrong: the first failure counts, though Serve tries again."""
    return deployment.status.name in ("DEPLOY_FAILED", "UNHEALTHY") or deployment.message.startswith(TRIES_AGAIN)


def cluster_of_its_own(num_cpus: int) -> dict[str, Any]:
    """For ray.init: a cluster that ends with this process, and what of it listens where."""
    return {
        "address": "local",  # never an unrelated cluster that happens to run here
        "namespace": NAMESPACE,
        "num_cpus": num_cpus,
        "object_store_memory": OBJECT_STORE_BYTES,
        "include_dashboard": True,  # `ray list actors` asks it
        "dashboard_host": "127.0.0.1",
    }


def _states(app: ApplicationStatusOverview | None) -> str:
    if app is None or not app.deployments:
        return "waiting for Ray Serve"
    parts = []
    for name, deployment in app.deployments.items():
        states = " ".join(
            f"{count} {getattr(state, 'value', state).lower()}" for state, count in deployment.replica_states.items()
        )
        parts.append(f"{name} {states or 'waiting for its bundles'}")
    return ", ".join(parts)


def proxy_options(serving: ServingConfig) -> dict[str, Any]:
    """Returns ``http_options`` and ``grpc_options`` for ``serve.start``. Ports are settled by then."""
    functions = [SERVICES, REFLECTION] if serving.reflection and serving.api_key is None else [SERVICES]
    assert serving.grpc_port is not None
    return {
        "http_options": HTTPOptions(host=serving.host, port=serving.http_port, keep_alive_timeout_s=300),
        "grpc_options": gRPCOptions(port=serving.grpc_port, grpc_servicer_functions=functions, enable_reflection=False),
    }


def _call(call: Callable[[], object], limit_s: float, while_true: Callable[[], bool] = lambda: True) -> bool:
    """Run ``call`` in a thread; stop waiting for it after ``limit_s`` seconds or when ``while_true`` no longer holds.

    Returns whether it ended. What it leaves undone is for end_descendants.
    """

    def quietly() -> None:
        try:
            call()
        except Exception:
            logging.getLogger(__name__).debug("while shutting down", exc_info=True)

    thread = threading.Thread(target=quietly, daemon=True)
    limit = time.monotonic() + limit_s
    thread.start()
    while thread.is_alive() and time.monotonic() < limit and while_true():
        thread.join(0.5)
    return not thread.is_alive()


def explain(message: str, logs: Iterable[str] = ()) -> str:
    """The last exception of a traceback as ``text``, on one line, its type named when it is not ours.

    Where that one only says that the cause is in a log, the last other exception of ``logs`` (their texts).
    """
    text = _last_exception(message)
    if text is None or _ELSEWHERE.search(text):
        for log in logs:
            cause = _last_exception(log)
            if cause is not None and not _ELSEWHERE.search(cause):
                return cause
    return text if text is not None else _squeeze(message)


def _last_exception(text: str) -> str | None:
    lines = [_LOG_PREFIX.sub("", line) for line in text.splitlines()]
    for index in range(len(lines) - 1, -1, -1):
        found = _ERROR.match(lines[index].strip())
        if found is None or _ELSEWHERE.search(lines[index]) or (found["text"] or "").startswith("Traceback"):
            # What points to another place is used only when nothing else is said.
            continue
        said = [found["text"] or ""]
        for line in lines[index + 1 : index + MOST_LINES]:
            if _END.match(line):
                break
            said.append(line.strip())
        joined = _squeeze(" ".join(said))
        return joined if found["type"] in ("ConfigError", "RequestError") and joined else f"{found['type']}: {joined}"
    for line in reversed(lines):
        if _ELSEWHERE.search(line):
            return _squeeze(line)
    return None


def _squeeze(text: str) -> str:
    squeezed = " ".join(text.split()).partition(" [type=")[0]  # pydantic's, with all of the value and an address
    return squeezed if len(squeezed) <= 600 else squeezed[:600] + " …"
