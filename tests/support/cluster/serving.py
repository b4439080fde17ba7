"""Runs one Ray and Serve cluster for a test session, and the deployments that its tests share, one at a time."""

from __future__ import annotations

import os
import secrets
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import grpc
import ray
from ray import serve
from ray.core.generated import gcs_pb2

from outrider.actors.serve_adapter import GRPC_HOST_VARIABLE, SERVE_ENVIRONMENT
from outrider.actors.serving.authentication import TOKEN_VARIABLE
from outrider.cluster.config import DraftModelConfig, GatewayConfig, OutriderConfig, ServingConfig, parse_config
from outrider.cluster.placement import NAMESPACE, available_cores
from outrider.deploy import app
from outrider.deploy.app import ReplicaPlan, build_app, plan_replica
from outrider.deploy.client.sync_client import OutriderClient, OutriderError
from outrider.deploy.gateway import Gateway
from outrider.deploy.ports import pick_free_port
from outrider.deploy.server import proxy_options
from outrider.v1 import generation_pb2 as pb
from tests.support.cluster.scrape import parse
from tests.support.models.reference import Reference
from tests.support.models.tiny_models import (
    VOCAB_SIZE,
    build_one_pass,
    build_tiny_adapter,
    build_tiny_llama,
    merge_adapter,
    pad_vocabulary,
)
from tests.support.models.tiny_pictures import build_tiny_idefics, build_tiny_paddle

Answer = TypeVar("Answer")

K = 8
WIDE_VOCAB_SIZE = VOCAB_SIZE + 32
MAX_MODEL_LEN = 1024
CHAT_TEMPLATE = (
    "{% for tool in tools or [] %}tool {{ tool.function.name }}\n{% endfor %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
PATH_ROUNDS, PATH_TOKENS = "outrider:path_rounds_total", "outrider:path_tokens_total"
"""Metrics: rounds with further paths of a draft tree, and what these have brought."""

TRACES_PORT = pick_free_port()
"""The port of the collector of traces that tests may start."""

HANG_GUARD_S = 180.0
"""Seconds that a test waits for what has no deadline of its own. Nothing is measured against it."""


@dataclass(frozen=True)
class Models:
    target: Path
    drafter: Path
    wide_target: Path
    """The target with a vocabulary that is padded further."""

    wide_drafter: Path
    one_pass: Path
    """The drafter with a mask token: the first of its drafts is often the target's own, others seldom are."""

    adapters: dict[str, Path]
    """Adapters of the target, by name."""

    merged: dict[str, Path]
    """The target with each of them in its weights."""

    sees: Path
    """A target that sees pictures, of the same language model."""

    sees_by_mrope: Path
    """A target that sees pictures, with positions in three dimensions."""


def build_models(directory: Path) -> Models:
    """Build a target, and a drafter that agrees with it on most tokens, not on all."""
    target = build_tiny_llama(directory / "tiny")
    drafter = build_tiny_llama(directory / "tiny-drafter", noise_of=target, noise=0.03)
    # A drafter without any agrees with the target often with the first, and seldom with the others.
    adapters = {
        name: build_tiny_adapter(directory / LATER / name, target, rank=rank, seed=rank, scale=scale)
        for name, rank, scale in (("near", 8, 0.05), ("far", 4, 0.5), ("own", 3, 0.5), ("later", 2, 0.4))
    }
    return Models(
        target,
        drafter,
        pad_vocabulary(directory / "wide", target, WIDE_VOCAB_SIZE),
        pad_vocabulary(directory / "wide-drafter", drafter, WIDE_VOCAB_SIZE),
        build_one_pass(directory / "one-pass", drafter),
        adapters,
        {name: merge_adapter(directory / f"merged-{name}", target, path) for name, path in adapters.items()},
        build_tiny_idefics(directory / "sees", target),
        build_tiny_paddle(directory / "sees-by-mrope", target),
    )


LATER = "adapters"
"""Directory beneath the models' from which adapters may be loaded at run time."""

TARGET_ENGINE_ARGS: dict[str, Any] = {
    "block_size": 64,
    "enable_chunked_prefill": True,
    "load_format": "safetensors",
    "prefix_caching_hash_algo": "sha256_cbor",
}
"""Engine arguments of the one deployment whose target has some."""

DRAFTER_ENGINE_ARGS: dict[str, Any] = {"load_format": "safetensors", "gpu_memory_utilization": 0.4}
"""Engine arguments of the one deployment whose drafter has some."""

ISOLATED = {"tenant_isolation": True}
"""The ``serving`` section where tests read ``cached_tokens``, which tell of a caller's own prompts only."""

DEADLINES = {"round_deadline_ms": 1000, "link_deadline_ms": 5000}
"""The CPU's defaults of ``link``, written so that they hold on GPUs too: the default there is two of the target's
steps, in which a draft model as large as the target does not draft K tokens."""


def engine(model: Path, **changes: Any) -> dict[str, Any]:
    """Return an engine's section, of which two fit on one GPU.

    vLLM starts no engine unless its share of the memory is free.
    """
    common: dict[str, Any] = {"dtype": "float32", "max_model_len": MAX_MODEL_LEN, "kv_cache_memory_bytes": 64 << 20}
    arguments = {"gpu_memory_utilization": 0.4, **changes.pop("engine_args", {})}
    return {"model": str(model), **common, "engine_args": arguments, **changes}


def configurations(models: Models, half: int = 1) -> dict[str, dict[str, Any]]:
    """Return every deployment the tests use, by the name of its fixture. half: of the tests, when both run at once."""

    def core(number: int) -> list[list[int]] | None:
        """The second half takes them the other way round: two targets on one core would leave the other to drafters,
        which wait for them. None on GPUs, where cores are refused."""
        if app.engine_on_gpu():
            return None
        cores = available_cores()
        return [[cores[(number + half - 1) % len(cores)]]] if len(cores) > 1 else None

    # One core each: of tiny models, threads that share a core with others take several times as long as one alone.
    target = engine(models.target, cores=core(0))
    draft_model = {"method": "draft_model", **engine(models.drafter)}
    pinned_draft_model = {**draft_model, "cores": core(1)}
    target_of_two = engine(models.target, tensor_parallel_size=2)
    drafter_of_two = {**draft_model, "tensor_parallel_size": 2}
    # Ranks that share cores take seconds for their first steps.
    patient = {
        "speculation": {"adaptive": False},
        "link": {"round_deadline_ms": 5000, "link_deadline_ms": 30000},
    }
    # Tests that look at drafts need them in every round, whether they pay or not.
    always = {"speculation": {"num_speculative_tokens": K, "adaptive": False}, "link": DEADLINES}
    adapters = [{"name": name, "path": str(models.adapters[name])} for name in ("near", "far", "own")]
    lora = {"max_lora_rank": 8, "max_loras": 4}
    return {
        "pair": {
            "target": target,
            "drafter": {**pinned_draft_model, "engine_args": DRAFTER_ENGINE_ARGS},
            **always,
            "openai": {"chat_template": CHAT_TEMPLATE, "tool_call_parser": "hermes"},
            "serving": ISOLATED,
        },
        # Few seats, so that a test can fill them.
        "ngram_pair": {
            "target": {**target, "max_num_seqs": 4, "engine_args": TARGET_ENGINE_ARGS},
            "drafter": {"method": "ngram", "cores": core(1)},
            **always,
            "link": {"round_deadline_ms": 300, "link_deadline_ms": 5000},  # a busy machine's pause is no end
            "serving": {
                **ISOLATED,
                "otlp_traces_endpoint": f"http://127.0.0.1:{TRACES_PORT}",
                "log_format": "json",
            },
        },
        # Both sides run out of KV long before the requests end: 16 blocks of 128 tokens each, as sized on CPU.
        "small_kv": {
            "target": {**target, "kv_cache_memory_bytes": 2 << 20, "max_num_batched_tokens": 96},
            "drafter": {**pinned_draft_model, "kv_cache_memory_bytes": 3 << 19},
            **always,
        },
        "paths": {
            "target": {**target, "kv_cache_memory_bytes": 2 << 20, "max_num_batched_tokens": 96},
            "drafter": {**pinned_draft_model, **engine(models.one_pass)},
            "speculation": {"num_speculative_tokens": 4, "adaptive": False, "num_paths": 4},
            "link": DEADLINES,
        },
        "several": {
            "target": target,
            "drafter": {**pinned_draft_model, "beside": ["ngram", "suffix"]},
            **always,
        },
        # As little KV as small_kv's target has.
        "no_drafter": {"target": {**target, "kv_cache_memory_bytes": 2 << 20, "max_num_batched_tokens": 96}},
        "co_located": {
            "target": {**target, "max_num_batched_tokens": 128},
            "drafter": {
                "placement": "co_located",
                "method": "draft_model",
                "model": str(models.drafter),
                "num_speculative_tokens": 4,
            },
        },
        # Small limits, so that a test can fill them.
        "two_replicas": {
            "target": {**target, "max_num_seqs": 4},
            "drafter": {"method": "suffix", "cores": core(1)},
            "speculation": {"adaptive": False},
            "serving": {
                **ISOLATED,
                "num_replicas": 2,
                "max_ongoing_requests": 8,
                "max_queued_requests": 32,
                "step_watchdog_s": 10,
            },
        },
        # Two targets, and two drafters for whoever needs one.
        "pool": {
            "target": {**target, "max_num_seqs": 4},
            "drafter": {**pinned_draft_model, "placement": "pool", "num_drafters": 2},
            **always,
            "link": {**DEADLINES, "link_deadline_ms": 10_000},
            "serving": {"num_replicas": 2, "num_ingresses": 2},
        },
        # One tokenizer, padded to two sizes.
        "wide_target": {
            "target": {**target, "model": str(models.wide_target)},
            "drafter": pinned_draft_model,
            **always,
        },
        "wide_drafter": {
            "target": target,
            "drafter": {**pinned_draft_model, "model": str(models.wide_drafter)},
            **always,
        },
        "adapters": {
            "target": {**target, "lora_modules": adapters, "engine_args": lora},
            "drafter": {**pinned_draft_model, "lora_modules": adapters[2:], "engine_args": {"max_lora_rank": 8}},
            **always,
            "openai": {"chat_template": CHAT_TEMPLATE},
            "serving": ISOLATED,
        },
        "pictures_mrope": {
            "target": {
                **target_of_two,
                "model": str(models.sees_by_mrope),
                "engine_args": {"limit_mm_per_prompt": {"image": 2}},
                "max_num_batched_tokens": 96,
                "kv_cache_memory_bytes": 1 << 20,
            },
            "drafter": {"method": "suffix"},
            **patient,
        },
        # What else the target can be, at once: two ranks, steps one after the other, guesses from others' answers.
        "adapters_tp2": {
            "target": {
                **target_of_two,
                "lora_modules": adapters,
                "engine_args": {**lora, "max_loras": 3},
                "async_scheduling": False,
            },
            "drafter": {"method": "suffix"},
            **patient,
        },
        # Little KV cache, and steps of few tokens: prompts run in parts, and requests are preempted.
        "pictures": {
            "target": {
                **target,
                "model": str(models.sees),
                # The host is never reached.
                "engine_args": {"limit_mm_per_prompt": {"image": 2}, "allowed_media_domains": ["localhost"]},
                "max_num_batched_tokens": 96,
                "kv_cache_memory_bytes": 2 << 20,
            },
            "drafter": {**pinned_draft_model, **engine(models.one_pass)},
            "speculation": {**always["speculation"], "num_paths": 4},
            "link": DEADLINES,
            "openai": {"enable_prompt_tokens_details": True},
            "serving": ISOLATED,
        },
        "both_tp2": {"target": target_of_two, "drafter": drafter_of_two, **patient},
        "target_tp2": {"target": target_of_two, "drafter": draft_model, **patient},
        # Four ranks, and KV for a few hundred tokens a request: 16 blocks of 128.
        "stages": {
            "target": {
                **target_of_two,
                "pipeline_parallel_size": 2,
                "max_num_batched_tokens": 96,
                "kv_cache_memory_bytes": 1 << 19,
            },
            "drafter": draft_model,
            **patient,
        },
        "drafter_tp2": {"target": engine(models.target), "drafter": drafter_of_two, **patient},
        "one_pass": {
            "target": target,
            "drafter": {**drafter_of_two, **engine(models.one_pass), "parallel_drafting": True},
            **patient,
        },
    }


@dataclass
class Actor:
    """Describes a living Ray actor, as the cluster's table has it."""

    name: str
    pid: int
    bundles: set[int]
    """Placement bundles whose resources it holds."""


def actor_table() -> list[gcs_pb2.ActorTableData]:
    """Return the cluster's entries of living actors."""
    table = ray._private.state.state._connect_and_get_accessor().get_actor_table(None, "ALIVE")
    actors = [gcs_pb2.ActorTableData.FromString(data) for data in table]
    return [actor for actor in actors if actor.state == gcs_pb2.ActorTableData.ALIVE]


def living_actors() -> list[tuple[str, int]]:
    """Return the name and process of each living actor."""
    return [(actor.name, actor.pid) for actor in actor_table()]


@dataclass
class Deployment:
    """Gives access to a running application, and to references that judge its answers."""

    name: str
    config: OutriderConfig
    plan: ReplicaPlan
    address: str
    client: OutriderClient
    reference: Reference
    drafter_reference: Reference
    http_url: str
    """The address of the HTTP APIs, without a slash at its end."""

    models: Models
    reference_of: Callable[[Path], Reference]
    """Returns the reference of a checkpoint."""

    def status(self) -> pb.GetServerStatusResponse:
        return self.client.status(timeout_s=HANG_GUARD_S)

    def linked(self, epoch_after: int = -1, within_s: float = HANG_GUARD_S) -> pb.LinkStatus:
        """Wait for the link to be up: it may be made anew just now, after a pause of the whole machine."""

        def up() -> pb.LinkStatus | None:
            link = self.status().link
            return link if link.state == pb.LINK_STATE_UP and link.epoch > epoch_after else None

        link: pb.LinkStatus = wait_until(up, within_s, "a link")
        return link

    def actors(self) -> dict[str, Actor]:
        """Return actors by the part of the name before the replica's id; Serve's own names by their deployment."""
        found = {}
        for actor in actor_table():
            if actor.name:
                key = actor.name.split("#")[1] if "#" in actor.name else actor.name.split(":")[0]
                resources = [name.split("_") for name in actor.required_resources if "_group_" in name]
                found[key] = Actor(actor.name, actor.pid, {int(p[2]) for p in resources if len(p) == 4})
        return found

    def replicas(self, of: str = "Target") -> dict[str, int]:
        """Return the processes of a deployment's living replicas, by Serve's id of each."""
        return {name.split("#")[2]: pid for name, pid in living_actors() if f"#{of}#" in name}

    def drafters(self) -> dict[str, int]:
        """Return the processes of the living drafters, by name."""
        return {name: pid for name, pid in living_actors() if name.startswith("Drafter:")}

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric over all replicas. A scrape within a second of another gets its numbers."""
        time.sleep(1.1)
        with urllib.request.urlopen(f"{self.http_url}/metrics", timeout=HANG_GUARD_S) as response:
            return parse(response.read().decode(), time.monotonic()).sum(name, **labels)

    def all_replicas_are_known(self) -> bool:
        """Return whether the ingress knows every replica: it asks each of them for its metrics."""
        with urllib.request.urlopen(f"{self.http_url}/metrics", timeout=HANG_GUARD_S) as response:
            up = parse(response.read().decode(), time.monotonic()).of("outrider:replica_up")
        known = {labels["replica"] for labels, value in up if value == 1} - set(self.replicas("DrafterPool"))
        return known == set(self.replicas()) and len(known) == self.config.serving.num_replicas

    def drafter(self) -> Any:
        """Return Ray's handle of the drafter actor."""
        return ray.get_actor(self.actors()["Drafter"].name, namespace=NAMESPACE)

    def drafter_status(self) -> dict[str, Any]:
        return ray.get(self.drafter().status.remote(), timeout=HANG_GUARD_S)

    def signal_drafter(self, number: signal.Signals) -> int:
        pid = self.actors()["Drafter"].pid
        os.kill(pid, number)
        return pid


def wait_until(condition: Callable[[], Any], within_s: float, what: str, every_s: float = 0.05) -> Any:
    """Wait for the first true value of condition, and return it. Fails when there is none in time."""
    give_up = time.monotonic() + within_s
    while not (value := condition()):
        assert time.monotonic() < give_up, f"{what}: not within {within_s:g} s"
        time.sleep(every_s)
    return value


def num_draft_tokens(answer: pb.GenerateResponse) -> int:
    return answer.metrics.speculative_decoding.num_draft_tokens


def num_accepted(answer: pb.GenerateResponse) -> int:
    """Return the draft tokens that were accepted."""
    return answer.metrics.speculative_decoding.num_accepted_draft_tokens


def drafted(ask: Callable[[], Answer], count: Callable[[Answer], int] = num_draft_tokens) -> Answer:
    """Ask until an answer has drafts, as count counts them, and return it.

    On a busy machine a short answer may be over before the drafter has read its prompt.
    """

    def once() -> Answer | None:
        answer = ask()
        return answer if count(answer) > 0 else None

    answer: Answer = wait_until(once, HANG_GUARD_S, "an answer with drafts")
    return answer


def is_idle(status: pb.GetServerStatusResponse) -> bool:
    """Return whether engine and drafter hold no request and no KV block. A drafter must have answered."""
    if status.num_speculative_tokens and not status.HasField("drafter"):
        return False
    return not any(
        (load.running, load.waiting, load.kv_cache_usage) != (0, 0, 0) for load in (status.target, status.drafter)
    )


def wait_until_idle(deployment: Deployment, within_s: float) -> None:
    seen = pb.GetServerStatusResponse()

    def idle() -> bool:
        nonlocal seen
        try:
            seen = deployment.status()
        except OutriderError as error:
            if error.code is not grpc.StatusCode.UNAVAILABLE:
                raise
            return False  # rank 0 is in a long step
        return is_idle(seen)

    try:
        wait_until(idle, within_s, "everything freed")
    except AssertionError as error:
        raise AssertionError(f"{error}; target {seen.target}, drafter {seen.drafter}") from None


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

    def __init__(self, models: Models, half: int = 1) -> None:
        self._configurations = configurations(models, half)
        self._models = models
        self._drafter = str(models.drafter)
        self._references: dict[str, Reference] = {}
        """References by checkpoint."""

        self._current: Deployment | None = None
        self._gateway: Gateway | None = None
        self._ports = pick_free_port(), pick_free_port()
        """The gateway's ports of HTTP and gRPC, which clients connect to."""

        self.backends = ("127.0.0.1", pick_free_port()), ("127.0.0.1", pick_free_port())
        """Serve's own proxies, of HTTP and gRPC."""

    def add(self, name: str, configuration: dict[str, Any]) -> None:
        """Add a deployment that one test alone needs."""
        self._configurations[name] = configuration

    def use(self, name: str) -> Deployment:
        if self._current is not None and self._current.name == name:
            return self._current
        self.cluster()
        self._take_down()
        config = parse_config(self._configurations[name])
        plan = plan_replica(config)
        # So that a test may change how many there are.
        pooled = plan.pool is not None and getattr(config.drafter, "autoscaling", None) is None
        serve.run(
            build_app(config, plan), name=config.serving.app_name, route_prefix="/", external_scaler_enabled=pooled
        )
        address = f"127.0.0.1:{self._ports[1]}"
        client = OutriderClient(address)
        drafter = config.drafter.model if isinstance(config.drafter, DraftModelConfig) else self._drafter
        references = self._reference(config.target.model), self._reference(drafter)
        self._current = Deployment(
            name,
            config,
            plan,
            address,
            client,
            *references,
            f"http://127.0.0.1:{self._ports[0]}",
            self._models,
            lambda checkpoint: self._reference(str(checkpoint)),
        )
        wait_until(lambda: _answers(client), HANG_GUARD_S, "an answer from the proxy")
        if config.serving.num_replicas > 1:
            # The application counts as running before its ingress has heard of every replica.
            wait_until(self._current.all_replicas_are_known, HANG_GUARD_S, "every replica's metrics", every_s=0.5)
        return self._current

    def cluster(self) -> int:
        """Starts Ray, Serve and the gateway where they do not run. Returns the public gRPC port."""
        if self._gateway is None:
            self._gateway = self._start_cluster()
        return self._ports[1]

    def another_gateway(self, **config: Any) -> Gateway:
        """Starts one more gateway before the same proxies. Its caller stops it."""
        config = {"http_port": 0, "grpc_port": 0, **config}
        gateway = Gateway(GatewayConfig(**config), os.environ[TOKEN_VARIABLE], *self.backends)
        gateway.start()
        return gateway

    def ties(self) -> list[str]:
        """Return the places of near-ties, however often each was met."""
        return [tie for reference in self._references.values() for tie in reference.ties]

    def _reference(self, model: str) -> Reference:
        return self._references.setdefault(model, Reference(Path(model)))

    def shutdown(self) -> None:
        if self._gateway is not None:
            self._take_down()
            self._gateway.stop()
            serve.shutdown()
            ray.shutdown()

    def _take_down(self) -> None:
        if self._current is not None:
            self._current.client.close()
            serve.delete(self._current.config.serving.app_name)
            self._current = None

    def _start_cluster(self) -> Gateway:
        token = os.environ.setdefault(TOKEN_VARIABLE, secrets.token_hex(32))
        os.environ.update({**SERVE_ENVIRONMENT, GRPC_HOST_VARIABLE: "127.0.0.1"})
        ray.init(
            "local",
            num_cpus=16,
            include_dashboard=False,
            namespace=NAMESPACE,
            log_to_driver=False,
            object_store_memory=256 << 20,
        )
        serving = ServingConfig(http_port=self.backends[0][1], grpc_port=self.backends[1][1])
        serve.start(**proxy_options(serving))
        # Some tests hold hundreds of connections from this one address.
        config = GatewayConfig(http_port=self._ports[0], grpc_port=self._ports[1], max_connections_per_address=2000)
        gateway = Gateway(config, token, *self.backends)
        gateway.start()
        return gateway


def _answers(client: OutriderClient) -> bool:
    try:
        return bool(client.status(timeout_s=10).model)
    except OutriderError:
        return False
