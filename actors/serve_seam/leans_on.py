"""Every name of Ray Serve's that this package overrides or uses beyond its public API, by the process that does.

Checked where that process starts (see cluster/borrowed.py), so that another Ray is refused by the name that it lacks.
Written for Ray 2.60.
"""

from __future__ import annotations

from outrider.actors.serve_seam import PROXY_ENVIRONMENT
from outrider.cluster.borrowed import Borrowed, Project, Table

PROJECT = Project("Ray", ("ray",), "2.60")

SERVE_LOGGER = "ray.serve"
"""Under which Serve logs; see replica_log.py."""

_ROUTER = "ray.serve._private.request_router.request_router:RequestRouter"
_CALLER = "ray.serve._private.router:AsyncioRouter"
_GRPC_SERVER = "ray.serve._private.grpc_util:gRPCGenericServer"

CALLER = Table(
    PROJECT,
    "actors/serve_seam/request_router.py and broadcast.py",
    (
        Borrowed(f"{_ROUTER}._deployment_id", "whose replicas are counted"),
        Borrowed(
            "ray.serve.config:AutoscalingConfig.metrics_interval_s",
            "set: how often callers' queues are told to the controller",
            read_by=("ray.serve._private.router:RouterMetricsManager.update_deployment_config",),
        ),
        Borrowed(
            f"{_ROUTER}._choose_replica_for_request",
            "overridden: where a request begins to wait, and a caller that gives up shows; there is no hook for it",
            exactly=("pending_request", "is_retry"),
            read_by=(f"{_CALLER}._route_and_send_request_once",),
        ),
        Borrowed(
            f"{_ROUTER}._get_next_pending_request_to_route",
            "overridden: whose turn it is",
            exactly=(),
            read_by=(f"{_ROUTER}._fulfill_pending_requests",),
        ),
        Borrowed(
            f"{_ROUTER}._pending_requests_to_route",
            "who waits and is looked for a place for by no task",
            read_by=(f"{_ROUTER}._choose_replica_for_request",),
        ),
        Borrowed(
            f"{_ROUTER}._cancel_routing_task_for_pending_request",
            "makes way for one whose turn comes before",
            exactly=("pending_request",),
        ),
        Borrowed(f"{_ROUTER}.curr_num_routing_tasks", "whether all of its tasks are taken"),
        Borrowed(f"{_ROUTER}.max_num_routing_tasks", "likewise"),
        Borrowed(f"{_ROUTER}.initialize_state", "overridden: the policy's settings", exactly=("kwargs",)),
        Borrowed(
            f"{_ROUTER}.update_replicas",
            "overridden: the policy hears of replicas",
            exactly=("replicas",),
            read_by=(f"{_ROUTER}._update_running_replicas",),
        ),
        Borrowed(f"{_ROUTER}.on_replica_actor_died", "overridden", exactly=("replica_id",)),
        Borrowed(f"{_ROUTER}.on_replica_actor_unavailable", "overridden", exactly=("replica_id",)),
        Borrowed(
            f"{_ROUTER}.choose_replicas",
            "overridden: the policy ranks",
            exactly=("candidate_replicas", "pending_request"),
            read_by=(f"{_ROUTER}._choose_replicas_with_backoff",),
        ),
        Borrowed(
            f"{_ROUTER}.on_request_routed",
            "overridden: a request is charged to whom it went to",
            exactly=("pending_request", "replica_id", "result"),
        ),
        Borrowed(
            f"{_ROUTER}.on_request_completed",
            "overridden: and no longer",
            exactly=("replica_id", "internal_request_id"),
        ),
        Borrowed(
            "ray.serve._private.request_router.common:PendingRequest",
            "what a request is profiled by; carries that, and the replica it is charged to",
            also=("args", "metadata", "routing_context", "future", "__dict__"),
        ),
        Borrowed(
            "ray.serve._private.request_router.common:RequestRoutingContext.should_backoff",
            "set: wait before the next try",
            read_by=(f"{_ROUTER}._choose_replicas_with_backoff",),
        ),
        Borrowed("ray.serve._private.common:RequestMetadata.internal_request_id", "by which a request is released"),
        Borrowed("ray.serve._private.common:ReplicaID.unique_id", "by which replicas are told apart"),
        Borrowed(
            "ray.serve._private.request_router.replica_wrapper:RunningReplica",
            "a replica and what it reports",
            also=("replica_id", "routing_stats"),
        ),
        Borrowed("ray.serve.handle:DeploymentHandle.broadcast", "calls every replica", takes=("method_name",)),
        Borrowed(
            "ray.serve.handle:DeploymentBroadcastResponse._fetch_replica_results_async",
            "one result a replica, where the public results are all or none",
            exactly=(),
        ),
        Borrowed("ray.serve._private.replica_result:ReplicaResult", "one answer", also=("get_async", "cancel")),
        Borrowed("ray.serve.handle:DeploymentHandle._router", "knows which replicas run"),
        Borrowed("ray.serve._private.router:SingletonThreadRouter._asyncio_router", "likewise"),
        Borrowed("ray.serve._private.router:CurrentLoopRouter._asyncio_router", "likewise"),
        Borrowed(f"{_CALLER}.request_router", "likewise; None until it has heard of any"),
        Borrowed(f"{_ROUTER}.curr_replicas", "those, by ReplicaID"),
    ),
)

GRPC_PROXY = Table(
    PROJECT,
    "actors/serve_seam/grpc_proxy.py",
    (
        Borrowed(
            f"{_GRPC_SERVER}.service_handler_factory",
            "swapped while our services are added: calls go through ours first",
            read_by=(f"{_GRPC_SERVER}._override_method_handler",),
        ),
        Borrowed(
            "ray.serve._private.proxy:gRPCProxy.service_handler_factory",
            "what makes Serve's own handlers",
            exactly=("service_method", "streaming_type"),
        ),
        Borrowed("ray.serve._private.proxy:gRPCProxy.proxy_router", "to which application a call goes"),
        Borrowed(
            "ray.serve._private.proxy_router:ProxyRouter.get_handle_for_endpoint",
            "likewise, by the name that a gRPC client gives",
            exactly=("target_app_name",),
            read_by=("ray.serve._private.proxy:GenericProxy._get_response_handler_info",),
        ),
        Borrowed(
            "ray.serve._private.proxy_router:ProxyRouter.match_route",
            "likewise, by an HTTP request's path",
            exactly=("target_route",),
            read_by=("ray.serve._private.proxy:GenericProxy._get_response_handler_info",),
        ),
        Borrowed("ray.serve._private.common:DeploymentID.app_name", "its name"),
        Borrowed(
            "ray.serve._private.proxy_request_response:gRPCProxyRequest.serialized_replica_arg",
            "pickles a request, which is gone then",
            exactly=(),
            read_by=("ray.serve._private.proxy:gRPCProxy.send_request_to_replica",),
        ),
        Borrowed(f"{_GRPC_SERVER}.add_generic_rpc_handlers", "adds them", exactly=("generic_rpc_handlers",)),
        Borrowed(
            f"{_GRPC_SERVER}.add_registered_method_handlers", "adds them", exactly=("service_name", "method_handlers")
        ),
        Borrowed(
            f"{_GRPC_SERVER}.add_passthrough_service", "says what Serve answers itself", exactly=("service_name",)
        ),
        Borrowed(
            "ray.serve._private.grpc_util:add_RayServeAPIServiceServicer_to_server",
            "adds Serve's own service, as a generic handler",
            read_by=("ray.serve._private.grpc_util:start_grpc_server",),
        ),
        Borrowed("grpc._utilities:DictionaryGenericHandler._method_handlers", "its methods, by their paths"),
        Borrowed(
            "ray.serve._private.proxy_request_response:gRPCStreamingType",
            "which of Serve's handlers",
            also=("UNARY_UNARY", "UNARY_STREAM"),
        ),
        Borrowed(
            "ray.serve._private.constants:DEFAULT_GRPC_SERVER_OPTIONS",
            "changed: what the server takes in",
            read_by=(f"{_GRPC_SERVER}.__init__",),
        ),
    ),
)

_SERVER = "grpc._cython.cygrpc:AioServer"

GRPC_SERVER = Table(
    Project("gRPC", ("grpcio",), "1."),
    "actors/serve_seam/grpc_proxy.py",
    (
        Borrowed(_SERVER, "replaced: a path may be no text", read_by=("grpc.aio._server:Server.__init__",)),
        Borrowed(f"{_SERVER}._request_call", "overridden: calls of what is not registered", exactly=()),
        Borrowed(f"{_SERVER}.add_generic_rpc_handlers", "overridden: which are", exactly=("generic_rpc_handlers",)),
        Borrowed(f"{_SERVER}.add_registered_method_handlers", "overridden: likewise", exactly=("method_handlers",)),
        Borrowed(f"{_SERVER}.start", "overridden: all are by then", exactly=()),
        Borrowed(
            "grpc._cython.cygrpc:_handle_rpc",
            "answers them",
            exactly=("method_name", "method_resolver", "interceptors", "rpc_state", "loop", "concurrency_exceeded"),
        ),
        Borrowed("grpc._cython.cygrpc:_MethodResolver", "of no method"),
        Borrowed(
            "grpc._cython.cygrpc:_schedule_rpc_coro",
            "likewise, until their callers have left",
            exactly=("rpc_coro", "rpc_state", "loop", "method_name"),
        ),
    ),
)

_PROTOCOL = "uvicorn.protocols.http.httptools_impl:HttpToolsProtocol"
_CYCLE = "uvicorn.protocols.http.httptools_impl:RequestResponseCycle"

HTTP_PROXY = Table(
    Project("uvicorn", ("uvicorn",), "0."),
    "actors/serve_seam/http_proxy.py and listening.py",
    (
        Borrowed("uvicorn.protocols.http.auto:AutoHTTPProtocol", "replaced: connections have time limits"),
        Borrowed(
            "uvicorn.server:Server.startup",
            "overridden: so have TLS handshakes",
            exactly=("sockets",),
            read_by=("uvicorn.server:Server._serve",),
        ),
        Borrowed(f"{_PROTOCOL}.connection_made", "overridden", exactly=("transport",)),
        Borrowed(f"{_PROTOCOL}.connection_lost", "overridden", exactly=("exc",)),
        Borrowed(f"{_PROTOCOL}.data_received", "overridden", exactly=("data",)),
        Borrowed(f"{_PROTOCOL}.on_message_begin", "overridden: a header begins", exactly=()),
        Borrowed(f"{_PROTOCOL}.on_headers_complete", "overridden: it has come", exactly=()),
        Borrowed(f"{_PROTOCOL}.on_header", "overridden: how many fields there are", exactly=("name", "value")),
        Borrowed(f"{_PROTOCOL}.on_body", "overridden: no header any more", exactly=("body",)),
        Borrowed(f"{_PROTOCOL}.on_message_complete", "overridden: likewise", exactly=()),
        Borrowed(
            f"{_PROTOCOL}.send_400_response",
            "overridden: in our own form, and into no answer that has begun",
            exactly=("msg",),
            read_by=(f"{_PROTOCOL}.data_received",),
        ),
        Borrowed(f"{_PROTOCOL}._should_upgrade", "whether it asks for a WebSocket", exactly=()),
        Borrowed(f"{_PROTOCOL}._unset_keepalive_if_required", "ends its wait for another request", exactly=()),
        Borrowed(f"{_PROTOCOL}.pipeline", "requests that wait for the one before"),
        Borrowed(
            f"{_PROTOCOL}._start_asgi_task",
            "overridden: which of them is being answered",
            exactly=("cycle", "app"),
            read_by=(f"{_PROTOCOL}.on_headers_complete", f"{_PROTOCOL}.on_response_complete"),
        ),
        Borrowed(f"{_PROTOCOL}.flow", "reads on while they wait"),
        Borrowed("uvicorn.protocols.http.flow_control:FlowControl.resume_reading", "likewise", exactly=()),
        Borrowed(
            "uvicorn.protocols.http.flow_control:FlowControl.resume_writing",
            "ends the wait to write of what is hung up on",
            exactly=(),
        ),
        Borrowed("uvicorn.protocols.http.flow_control:HIGH_WATER_LIMIT", "unless so much of them is there"),
        Borrowed("uvicorn.protocols.http.httptools_impl:STATUS_LINE", "first lines of answers"),
        Borrowed(f"{_PROTOCOL}.pause_writing", "overridden: the client does not read", exactly=()),
        Borrowed(f"{_PROTOCOL}.resume_writing", "overridden: it does again", exactly=()),
        Borrowed(f"{_PROTOCOL}.timeout_keep_alive_task", "tells whether it waits for another request"),
        Borrowed(f"{_PROTOCOL}.cycle", "the request that came last, if there is one"),
        Borrowed(
            _CYCLE,
            "whether it is answered, or has begun to be; ended for one that is refused, or whose client has left",
            also=("response_complete", "response_started", "disconnected", "message_event", "body", "scope"),
        ),
        Borrowed(f"{_CYCLE}.chunked_encoding", "set: none for a client of HTTP/1.0", read_by=(f"{_CYCLE}.send",)),
        Borrowed(f"{_CYCLE}.expected_content_length", "set: likewise", read_by=(f"{_CYCLE}.send",)),
    ),
)

_SCALING = "ray.serve._private.autoscaling_state"

CONTROLLER = Table(
    PROJECT,
    "actors/serve_seam/autoscaling.py and pool_scaling.py",
    (
        Borrowed(
            f"{_SCALING}:_resolve_policy_callable",
            "makes one object of a policy that is a class, with policy_kwargs",
            takes=("policy",),
            read_by=(f"{_SCALING}:DeploymentAutoscalingState.register",),
        ),
        Borrowed("ray.serve.config:AutoscalingPolicy", "names the policy", also=("policy_function", "policy_kwargs")),
        Borrowed(
            "ray.serve.config:AutoscalingContext",
            "what the policy is called with",
            also=(
                "app_name",
                "deployment_name",
                "running_replicas",
                "target_num_replicas",
                "raw_metrics",
                "total_queued_requests",
                "capacity_adjusted_min_replicas",
                "capacity_adjusted_max_replicas",
            ),
        ),
        Borrowed("ray.serve._private.common:ReplicaID.unique_id", "by which replicas are told apart"),
        Borrowed(
            "ray.serve._private.common:TimeStampedValue", "what a replica said, and when", also=("timestamp", "value")
        ),
    ),
)

_PROXY_START = "ray.serve._private.proxy:ProxyActor.__ray_metadata__.modified_class.__init__"

_CONSTANTS = "ray.serve._private.constants"
_READS_HEADERS = "ray.serve._private.proxy:HTTPProxy"

HEADERS = Table(
    PROJECT,
    "actors/serve_seam/http_proxy.py",
    (
        Borrowed(
            f"{_CONSTANTS}:SERVE_HTTP_REQUEST_DISCONNECT_DISABLED_HEADER",
            "dropped: an answer is made to its end for nobody",
            read_by=("ray.serve._private.http_util:parse_disconnect_disabled_header",),
        ),
        Borrowed(
            f"{_CONSTANTS}:SERVE_HTTP_REQUEST_TIMEOUT_S_HEADER",
            "dropped: by when it has to be",
            read_by=("ray.serve._private.http_util:parse_request_timeout_header",),
        ),
        Borrowed(
            f"{_CONSTANTS}:SERVE_MULTIPLEXED_MODEL_ID",
            "dropped: by which replica",
            read_by=(f"{_READS_HEADERS}.setup_request_context_and_handle",),
        ),
        Borrowed(
            f"{_CONSTANTS}:SERVE_SESSION_ID",
            "dropped: likewise",
            read_by=("ray.serve._private.http_util:_matches_session_id_header",),
        ),
        Borrowed(f"{_CONSTANTS}:SERVE_INGRESS_ROUTER_HEADER_PREFIX", "dropped: likewise"),
    ),
)

LISTENING = Table(
    PROJECT,
    "actors/serve_seam/listening.py",
    (
        Borrowed(
            "ray.serve._private.default_impl:add_grpc_address",
            "replaced: serving.host, TLS, keys for what Serve adds afterwards",
            exactly=("grpc_server", "server_address"),
            read_by=("ray.serve._private.grpc_util:start_grpc_server",),
        ),
        Borrowed(
            "ray.serve._private.http_util:uvicorn",
            "replaced: certificates that change, and clients', and how long a handshake may take",
            read_by=("ray.serve._private.http_util:start_asgi_http_server",),
        ),
        Borrowed(
            "ray.serve._private.http_util:configure_http_middlewares",
            "asks for middlewares before either is called",
            exactly=("http_options",),
            read_by=(_PROXY_START,),
        ),
    ),
)

INGRESS = Table(
    PROJECT,
    "actors/serve_seam/living.py",
    (
        Borrowed("ray._private.worker:global_worker.actors", "where a process's actors are"),
        Borrowed("ray.serve._private.replica:ReplicaActor._replica_impl", "a replica behind its actor"),
        Borrowed(
            "ray.serve._private.replica:Replica._shutting_down",
            "whether it is being stopped",
            read_by=("ray.serve._private.replica:Replica._perform_graceful_shutdown",),
        ),
    ),
)

REPLICA = Table(
    PROJECT,
    "actors/serving/replica.py, actors/serve_seam/replica_log.py and living.py",
    (
        Borrowed("ray.serve._private.constants:SERVE_NAMESPACE", "where its processes have their names"),
        Borrowed("ray.actor:ActorHandle._actor_id", "tells a proxy from the one that has its name after it"),
        Borrowed("ray.serve._private.constants:SERVE_LOGGER_NAME", "whose handlers are kept", value=SERVE_LOGGER),
        Borrowed(
            "logging.handlers:MemoryHandler",
            "what a replica's log goes through, and what vLLM's import closes",
            read_by=("ray.serve._private.logging_utils:configure_component_logger",),
        ),
        Borrowed(
            "ray.serve._private.replica:UserCallableWrapper.call_destructor",
            "calls a replica's __del__ when it ends in order",
        ),
        Borrowed(
            "ray.serve._private.constants:REQUEST_ROUTING_STATS_METHOD",
            "what a replica is asked for routing",
            value="record_routing_stats",
        ),
        Borrowed(
            "ray.serve._private.replica:UserCallableWrapper.call_record_autoscaling_stats",
            "asks a replica for record_autoscaling_stats, which it looks for by that name",
        ),
        Borrowed(
            "ray.serve.config:AutoscalingConfig.metrics_interval_s",
            "set: how often it is asked",
            read_by=("ray.serve._private.replica:ReplicaMetricsManager.start_metrics_pusher",),
        ),
    ),
)

SERVER = Table(
    PROJECT,
    "deploy/server.py and actors/serve_seam/living.py",
    (
        Borrowed("ray.serve._private.constants:SERVE_CONTROLLER_NAME", "who is ended when it stands still"),
        Borrowed("ray.serve._private.constants:SERVE_NAMESPACE", "where it has that name"),
        Borrowed(
            f"ray.serve._private.constants:{next(iter(PROXY_ENVIRONMENT))}",
            "where the HTTP proxies find our middlewares",
            read_by=("ray.serve._private.http_util:configure_http_middlewares",),
        ),
        Borrowed(
            "ray.serve._private.constants:PROXY_HEALTH_CHECK_PERIOD_S",
            "set: how soon a dead proxy is replaced",
            read_by=("ray.serve._private.proxy_state:ProxyState._reconcile_internal",),
        ),
        Borrowed(
            "ray.serve.schema:DeploymentStatusOverview",
            "what is still loading, and why it failed",
            also=("status", "status_trigger", "replica_states", "message"),
        ),
        Borrowed("ray.serve.schema:ApplicationStatusOverview", "likewise", also=("status", "message", "deployments")),
    ),
)

_PRIVATE = "ray.serve._private"

TIME = Table(
    PROJECT,
    "actors/serve_seam/steady_time.py",
    (
        Borrowed(
            f"{_PRIVATE}.deployment_state:time",
            "replaced: when replicas are asked for their health, and by when those that are taken down are to end",
            read_by=(
                f"{_PRIVATE}.deployment_state:ActorReplicaWrapper._should_start_new_health_check",
                f"{_PRIVATE}.deployment_state:DeploymentReplica.check_stopped",
            ),
        ),
        Borrowed(
            "ray._common.utils:time",
            "replaced: likewise of proxies",
            read_by=("ray._common.utils:Timer.time",),
        ),
        Borrowed(
            f"{_PRIVATE}.proxy:time",
            "replaced: since when a proxy has been drained",
            read_by=(f"{_PRIVATE}.proxy:GenericProxy.is_drained",),
        ),
        Borrowed(
            f"{_PRIVATE}.autoscaling_state:time",
            "replaced: how old the last report of load is",
            read_by=(f"{_PRIVATE}.autoscaling_state:DeploymentAutoscalingState._aggregate_samples",),
        ),
        Borrowed(
            f"{_PRIVATE}.replica:time",
            "replaced: of when a replica's report is",
            read_by=(f"{_PRIVATE}.replica:ReplicaMetricsManager._push_autoscaling_metrics",),
        ),
        Borrowed(
            f"{_PRIVATE}.router:time",
            "replaced: of when a caller's is",
            read_by=(f"{_PRIVATE}.router:RouterMetricsManager._get_metrics_report",),
        ),
    ),
)

WAITING = Table(
    PROJECT,
    "actors/serve_seam/waiting.py",
    (
        Borrowed(
            "ray.serve._private.common:ReplicaID",
            "a replica by the name of its placement group",
            also=("is_full_id_str", "from_full_id_str", "unique_id", "deployment_id"),
        ),
        Borrowed(
            "ray.serve._private.deployment_scheduler:CreatePlacementGroupRequest",
            "whose name is the replica's actor's",
            also=("name",),
        ),
    ),
)

TABLES = (CALLER, CONTROLLER, GRPC_PROXY, GRPC_SERVER, HTTP_PROXY, INGRESS, LISTENING, REPLICA, SERVER, TIME, WAITING)
