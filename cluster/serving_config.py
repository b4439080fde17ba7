"""The ``serving`` section: replicas, ports, queues, who may come in, and what is watched."""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal

from pydantic import (
    Discriminator,
    Field,
    SerializerFunctionWrapHandler,
    Tag,
    field_validator,
    model_serializer,
    model_validator,
)

from outrider.cluster.config_section import NodeLabels, Section
from outrider.cluster.gateway_config import GatewayConfig
from outrider.cluster.scaling_config import AutoscalingConfig


class NodeType(Section):
    """A kind of nodes that may come ([kubernetes.md](kubernetes.md)): what such a node has in all, as Ray is told."""

    cpus: float = Field(ge=0, allow_inf_nan=False)
    """Logical processors (``num-cpus`` of ``ray start``)."""

    gpus: float = Field(0.0, ge=0, allow_inf_nan=False)
    """GPUs."""

    labels: NodeLabels = Field(default_factory=dict)
    """Labels of Ray's that it carries."""

    max: int | None = Field(None, ge=1, le=10_000)
    """How many of them there are at most, today's among them, but for the head (``maxReplicas`` of a worker group).
    None: not known, so that there may be any number."""


class ServingConfig(Section):
    """Replicas, ports, queues, who may come in, and what is watched."""

    served_model_name: str | None = None
    """Name clients may put in ``model``. None: the last part of ``target.model``."""

    app_name: str = Field("outrider", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    """Serve application, and the registry's name."""

    num_replicas: int = Field(1, ge=1)
    """Target replicas, each with its own drafter; for a number that follows the load, ``autoscaling``."""

    autoscaling: AutoscalingConfig | None = None
    """Target replicas as the load takes them, between two numbers: ``{min: 1, max: 4}``, and what is under
    «serving.autoscaling». None: ``num_replicas``."""

    num_ingresses: int = Field(1, ge=1, le=16)
    """Ingress processes behind Serve's proxies, spread over the nodes. One that is lost takes only its own answers with
    it. Each has its part of ``max_ongoing_requests`` and ``max_queued_requests``, rounded up."""

    gateway: Annotated[
        Annotated[GatewayConfig, Tag("gateway_on")] | Annotated[Literal["off"], Tag("gateway_off")],
        Discriminator(lambda value: "gateway_off" if value in ("off", False) else "gateway_on"),
    ] = GatewayConfig()
    """HAProxy in front of Serve's proxies: ports, TLS, keys, rates and sizes; [gateway.md](gateway.md). ``off``:
    clients connect to Serve's own proxies."""

    host: str = Field("127.0.0.1", min_length=1)
    """Address that Serve's own HTTP and gRPC proxies listen on. ``0.0.0.0`` or ``::``: every interface."""

    http_port: int | None = Field(None, ge=0, le=65535)
    """Port of Serve's own HTTP proxy. Default: 8000 with ``gateway: off``, any free one behind a gateway."""

    grpc_port: int | None = Field(None, ge=0, le=65535)
    """Port of Serve's own gRPC proxy. Default: 9000 with ``gateway: off``, any free one behind a gateway."""

    api_key: str | None = Field(
        default_factory=lambda: os.environ.get("VLLM_API_KEY") or None, min_length=1, exclude=True, repr=False
    )
    """One key that all callers send, as ``Authorization: Bearer KEY``. It guards every HTTP path but probes and the
    page's files, and every gRPC method but health. Default: the environment variable VLLM_API_KEY, else none."""

    allowed_origins: list[str] = Field([], max_length=64)
    """Origins whose web pages may use this server (CORS), e.g. ``https://chat.example.com``; ``*``: any."""

    drain_s: float = Field(120.0, ge=0, le=86_400)
    """How long running answers may go on when the server, or a replica, is taken down. New ones are refused meanwhile;
    what is left then is cut."""

    nodes_may_come: bool = False
    """The cluster's nodes come and go, by an autoscaler or by hand: what today's cannot hold is waited for, instead of
    being refused. What is waited for is in the status, the metrics and the log."""

    node_types: list[NodeType] = Field([], max_length=64)
    """nodes_may_come: the kinds of nodes that may, e.g. ``[{cpus: 16, gpus: 4, labels: {zone: a}}]``. What these and
    today's nodes together could never hold is refused, as many replicas and drafters as there are at least, and a
    replica is kept on one node where they hold as many that way. Empty: not known, so that nothing is refused."""

    surge: bool | None = None
    """Whether a deploy that changes something has each new replica ready before an old one ends, which takes room for
    one more meanwhile. False: an old one ends first, and nobody is served by the only one until the next has loaded.
    None: where the nodes have the room. Those that may come have it where node_types do not say their ``max``. A pool's
    drafters likewise, but where there is no room for one more they are replaced in place, whatever this says."""

    max_ongoing_requests: int = Field(64, ge=1)
    """Requests a replica holds at once; its scheduler batches max_num_seqs of them. Left out on GPU: 256."""

    max_queued_requests: int = Field(256, ge=1)
    """Requests waiting beyond this are refused at once with RESOURCE_EXHAUSTED (HTTP 429). Counted by each caller of
    the replicas, which is one unless other applications call them too."""

    prefix_affinity: float = Field(8.0, ge=0, allow_inf_nan=False)
    """Several replicas: how many tokens of outstanding work a token of the prompt that a replica has cached outweighs
    when a replica is chosen. 0: replicas are chosen by load alone."""

    max_imbalance_tokens: int = Field(16384, ge=0)
    """Several replicas: one with this many tokens of outstanding work beyond the least loaded one's gets nothing more,
    whatever it has cached."""

    max_overtaking_s: float = Field(10.0, ge=0, le=3600)
    """How much later a small request may come and still be served before a larger one that waits. 0: in order of
    arrival."""

    tenant_isolation: bool = False
    """Whether prefix cache and suffix memory are separate for each caller: for each API key, or for each source address
    without keys. ``cached_tokens`` is reported only then, since it tells what others have asked."""

    reflection: bool = True
    """gRPC server reflection, v1 and v1alpha, by which tools such as grpcurl find the calls. Off where ``api_key`` is
    set, since Serve's proxies answer it without asking for a key."""

    structured_output: Literal["off", "json", "all"] = "all"
    """Constraints that requests may have. ``off``: none; ``json``: JSON schemas, JSON objects, choices and what tools
    need; ``all``: regexes, grammars and structural tags as well."""

    step_watchdog_s: float = Field(30.0, ge=1, allow_inf_nan=False)
    """A replica with requests of whose engine no step ends for so many seconds, and for 20 times the usual step, fails
    its health check, and is replaced; its requests get UNAVAILABLE."""

    otlp_traces_endpoint: str | None = Field(None, pattern=r"^https?://\S+$")
    """OpenTelemetry collector that gets a span a request and round, and vLLM's own, e.g. ``http://localhost:4317``
    (OTLP over gRPC). None: nothing is traced."""

    trace_sample_ratio: float = Field(1.0, ge=0, le=1)
    """Share of the requests that are traced, of those whose caller has not decided by a W3C traceparent."""

    log_format: Literal["text", "json"] = "text"
    """json: one object a line, with the request's id on every line about a request."""

    @model_validator(mode="after")
    def _belong_together(self) -> ServingConfig:
        if self.api_key is not None and self.gateway != "off" and self.gateway.keys_file is not None:
            raise ValueError(
                "api_key: is given, or VLLM_API_KEY is set, beside gateway.keys_file; put that key into the file, or "
                "leave one of the two out"
            )
        if self.node_types and not self.nodes_may_come:
            raise ValueError("node_types: says which nodes may come, and none may; set nodes_may_come, or remove it")
        if self.autoscaling is not None and "num_replicas" in self.model_fields_set:
            raise ValueError(
                "num_replicas: is given beside autoscaling, which decides it; leave it out, or write autoscaling.min"
            )
        return self

    @field_validator("gateway", mode="before")
    @classmethod
    def _off(cls, value: Any) -> Any:
        """YAML reads a bare ``off`` as false."""
        return "off" if value is False else value

    @model_serializer(mode="wrap")
    def _as_it_can_be_read_again(self, whole: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without the default of num_replicas beside what it may not stand beside."""
        written: dict[str, Any] = whole(self)
        if self.autoscaling is not None:
            written.pop("num_replicas", None)
        return written

    @property
    def public(self) -> tuple[str, int, int]:
        """Host, HTTP port and gRPC port that clients connect to."""
        if isinstance(self.gateway, GatewayConfig):
            return self.gateway.host, self.gateway.http_port, self.gateway.grpc_port
        return (
            self.host,
            8000 if self.http_port is None else self.http_port,
            9000 if self.grpc_port is None else self.grpc_port,
        )

    @property
    def least_replicas(self) -> int:
        """There always are, but for those that are being replaced."""
        return self.num_replicas if self.autoscaling is None else self.autoscaling.min

    @property
    def most_replicas(self) -> int:
        return self.num_replicas if self.autoscaling is None else self.autoscaling.max
