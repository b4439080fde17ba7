"""One Ray + Serve cluster for a test session, and the deployments that its tests share, one at a time."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.core.generated import gcs_pb2
from ray.serve.config import HTTPOptions, gRPCOptions

from outrider.actors.serve_seam import PROXY_ENVIRONMENT, SERVICER
from outrider.cluster.config import DraftModelConfig, OutriderConfig, parse_config
from outrider.cluster.placement import NAMESPACE
from outrider.deploy.app import ReplicaPlan, build_app, plan_replica
from outrider.deploy.client.sync_client import OutriderClient
from outrider.deploy.ports import pick_free_port
from outrider.v1 import generation_pb2 as pb
from tests.reference import Reference
from tests.tiny_models import VOCAB_SIZE, build_tiny_llama, pad_vocabulary

K = 8
WIDE_VOCAB_SIZE = VOCAB_SIZE + 32
MAX_MODEL_LEN = 1024
CHAT_TEMPLATE = (
    "{% for tool in tools or [] %}tool {{ tool.function.name }}\n{% endfor %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TRACES_PORT = pick_free_port()
"""Where the collector of traces listens that tests may start."""

HANG_GUARD_S = 180.0
"""How long a test waits for what has no deadline of its own. Nothing is measured against it."""


@dataclass(frozen=True)
class Models:
    target: Path
    drafter: Path
    wide_target: Path
    """The target with a vocabulary that is padded further."""

    wide_drafter: Path


def build_models(directory: Path) -> Models:
    """A target, and a drafter that agrees with it on most tokens, not on all."""
    target = build_tiny_llama(directory / "tiny")
    drafter = build_tiny_llama(directory / "tiny-drafter", noise_of=target, noise=0.03)
    return Models(
        target,
        drafter,
        pad_vocabulary(directory / "wide", target, WIDE_VOCAB_SIZE),
        pad_vocabulary(directory / "wide-drafter", drafter, WIDE_VOCAB_SIZE),
    )


def engine(model: Path, **changes: Any) -> dict[str, Any]:
    common = {"dtype": "float32", "max_model_len": MAX_MODEL_LEN, "kv_cache_memory_bytes": 64 << 20}
    return {"model": str(model), **common, **changes}


def configurations(models: Models) -> dict[str, dict[str, Any]]:
    """Every deployment the tests use, by the name of its fixture."""
    draft_model = {"method": "draft_model", **engine(models.drafter)}
    # Tests that look at drafts need them in every round, whether they pay or not.
    always = {"num_speculative_tokens": K, "adaptive": False}
    return {
        "pair": {
            "target": engine(models.target),
            "drafter": draft_model,
            "speculation": always,
            "openai": {"chat_template": CHAT_TEMPLATE, "tool_call_parser": "hermes"},
        },
        "ngram_pair": {
            "target": engine(models.target),
            "drafter": {"method": "ngram"},
            "speculation": always,
            "link": {"round_deadline_ms": 300, "link_deadline_ms": 2000},
            # Nothing is traced but what a caller asks for.
            "serving": {
                "otlp_traces_endpoint": f"http://127.0.0.1:{TRACES_PORT}",
                "trace_sample_ratio": 0,
                "log_format": "json",
            },
        },
        # Both sides run out of KV long before the requests end: 16 blocks of 128 tokens each, as sized on CPU.
        "small_kv": {
            "target": engine(models.target, kv_cache_memory_bytes=2 << 20, max_num_batched_tokens=96),
            "drafter": {**draft_model, "kv_cache_memory_bytes": 3 << 19},
            "speculation": {"num_speculative_tokens": K},
        },
        "no_drafter": {"target": engine(models.target)},
        "co_located": {
            "target": engine(models.target, max_num_batched_tokens=128),
            "drafter": {
                "placement": "co_located",
                "method": "draft_model",
                "model": str(models.drafter),
                "num_speculative_tokens": 4,
            },
        },
        # Small limits, so that a test can fill them.
        "two_replicas": {
            "target": engine(models.target, max_num_seqs=4),
            "drafter": {"method": "suffix"},
            "serving": {"num_replicas": 2, "max_ongoing_requests": 8, "max_queued_requests": 32},
        },
        # One tokenizer, padded to two sizes.
        "wide_target": {"target": engine(models.wide_target), "drafter": draft_model, "speculation": always},
        "wide_drafter": {
            "target": engine(models.target),
            "drafter": {**draft_model, "model": str(models.wide_drafter)},
            "speculation": always,
        },
        # Ranks that share cores take seconds for their first steps.
        "target_tp2": {
            "target": engine(models.target, tensor_parallel_size=2),
            "drafter": draft_model,
            "speculation": {"adaptive": False},
            "link": {"round_deadline_ms": 5000, "link_deadline_ms": 30000},
        },
        "drafter_tp2": {
            "target": engine(models.target),
            "drafter": {**draft_model, "tensor_parallel_size": 2},
            "speculation": {"adaptive": False},
            "link": {"round_deadline_ms": 5000, "link_deadline_ms": 30000},
        },
    }


@dataclass
class Actor:
    """A living Ray actor, as the cluster's table has it."""

    name: str
    pid: int
    bundles: set[int]
    """Placement bundles whose resources it holds."""


def _living_actors() -> list[tuple[str, int]]:
    """Name and process of each."""
    table = ray._private.state.state._connect_and_get_accessor().get_actor_table(None, "ALIVE")
    actors = [gcs_pb2.ActorTableData.FromString(data) for data in table]
    return [(actor.name, actor.pid) for actor in actors if actor.state == gcs_pb2.ActorTableData.ALIVE]


@dataclass
class Deployment:
    """A running application, and what a test needs to talk to it and to judge its answers."""

    name: str
    config: OutriderConfig
    plan: ReplicaPlan
    address: str
    client: OutriderClient
    reference: Reference
    drafter_reference: Reference
    http_url: str
    """Without a slash at its end."""

    def status(self) -> pb.GetServerStatusResponse:
        return self.client.status(timeout_s=HANG_GUARD_S)

    def actors(self) -> dict[str, Actor]:
        """By the part of the name before the replica's id; Serve's own names by their deployment."""
        found = {}
        for data in ray._private.state.state._connect_and_get_accessor().get_actor_table(None, "ALIVE"):
            actor = gcs_pb2.ActorTableData.FromString(data)
            if actor.state == gcs_pb2.ActorTableData.ALIVE and actor.name:
                key = actor.name.split("#")[1] if "#" in actor.name else actor.name.split(":")[0]
                resources = [name.split("_") for name in actor.required_resources if "_group_" in name]
                found[key] = Actor(actor.name, actor.pid, {int(p[2]) for p in resources if len(p) == 4})
        return found

    def replicas(self) -> dict[str, int]:
        """Processes of the living target replicas, by Serve's id of each."""
        return {name.split("#")[2]: pid for name, pid in _living_actors() if "#Target#" in name}

    def drafter(self) -> Any:
        """Ray's handle of the drafter actor."""
        return ray.get_actor(self.actors()["Drafter"].name, namespace=NAMESPACE)

    def drafter_status(self) -> dict[str, Any]:
        return ray.get(self.drafter().status.remote(), timeout=HANG_GUARD_S)

    def signal_drafter(self, number: signal.Signals) -> int:
        pid = self.actors()["Drafter"].pid
        os.kill(pid, number)
        return pid


def wait_until(condition: Callable[[], Any], within_s: float, what: str, every_s: float = 0.05) -> Any:
    """The first true value of condition. Fails when there is none in time."""
    give_up = time.monotonic() + within_s
    while not (value := condition()):
        assert time.monotonic() < give_up, f"{what}: not within {within_s:g} s"
        time.sleep(every_s)
    return value


def is_idle(status: pb.GetServerStatusResponse) -> bool:
    """No request, no KV block in use, in the engine and in the drafter, which must have answered."""
    return status.HasField("drafter") and not any(
        (load.running, load.waiting, load.kv_cache_usage) != (0, 0, 0) for load in (status.target, status.drafter)
    )


def wait_until_idle(deployment: Deployment, within_s: float) -> None:
    seen: list[pb.GetServerStatusResponse] = []

    def idle() -> bool:
        seen[:] = [deployment.status()]
        return is_idle(seen[0])

    try:
        wait_until(idle, within_s, "everything freed")
    except AssertionError as error:
        raise AssertionError(f"{error}; target {seen[0].target}, drafter {seen[0].drafter}") from None


@contextmanager
def ended_early(deployment: Deployment, tokens: int) -> Iterator[None]:
    """Around what ends one request that has so many tokens to go. Afterwards nothing is left of it in engine and
    drafter, and not because it came to its own end: told by tokens, since a machine may be as slow as it likes."""
    wait_until_idle(deployment, HANG_GUARD_S)
    before = deployment.status().rounds
    yield
    wait_until_idle(deployment, HANG_GUARD_S)
    after = deployment.status().rounds
    made = after.rounds - before.rounds + after.accepted - before.accepted
    assert made < 0.9 * tokens, f"{made} tokens of {tokens} were made for nobody"


class Deployments:
    """Starts the cluster with the first deployment asked for and swaps the application when another is asked for."""

    def __init__(self, models: Models) -> None:
        self._configurations = configurations(models)
        self._drafter = str(models.drafter)
        self._references: dict[str, Reference] = {}
        """By checkpoint."""

        self._current: Deployment | None = None
        self._grpc_port: int | None = None
        self._http_port = pick_free_port()

    def use(self, name: str) -> Deployment:
        if self._current is not None and self._current.name == name:
            return self._current
        self.cluster()
        self._take_down()
        config = parse_config(self._configurations[name])
        plan = plan_replica(config)
        serve.run(build_app(config, plan), name=config.serving.app_name, route_prefix="/")
        address = f"127.0.0.1:{self._grpc_port}"
        client = OutriderClient(address)
        drafter = config.drafter.model if isinstance(config.drafter, DraftModelConfig) else self._drafter
        references = self._reference(config.target.model), self._reference(drafter)
        self._current = Deployment(
            name, config, plan, address, client, *references, f"http://127.0.0.1:{self._http_port}"
        )
        wait_until(lambda: _answers(client), HANG_GUARD_S, "an answer from the proxy")
        return self._current

    def cluster(self) -> None:
        """Ray and Serve are up, whatever is deployed."""
        if self._grpc_port is None:
            self._grpc_port = self._start_cluster()

    def ties(self) -> list[str]:
        return [tie for reference in self._references.values() for tie in reference.ties]

    def _reference(self, model: str) -> Reference:
        return self._references.setdefault(model, Reference(Path(model)))

    def shutdown(self) -> None:
        if self._grpc_port is not None:
            self._take_down()
            serve.shutdown()
            ray.shutdown()

    def _take_down(self) -> None:
        if self._current is not None:
            self._current.client.close()
            serve.delete(self._current.config.serving.app_name)
            self._current = None

    def _start_cluster(self) -> int:
        port = pick_free_port()
        os.environ.update(PROXY_ENVIRONMENT)
        ray.init(
            "local",
            num_cpus=16,
            include_dashboard=False,
            namespace=NAMESPACE,
            log_to_driver=False,
            object_store_memory=256 << 20,
        )
        serve.start(
            http_options=HTTPOptions(host="127.0.0.1", port=self._http_port),
            grpc_options=gRPCOptions(port=port, grpc_servicer_functions=[SERVICER]),
        )
        return port


def _answers(client: OutriderClient) -> bool:
    from outrider.deploy.client.sync_client import OutriderError

    try:
        return bool(client.status(timeout_s=10).model)
    except OutriderError:
        return False
