"""Every name of vLLM's that this package overrides, patches or drives by hand, by the process that does.

Checked where that process starts (see cluster/borrowed.py), so that another vLLM is refused by the name that it lacks.
Written for vLLM 0.32. What is imported or called by its public API alone (AsyncLLM, SamplingParams, the serving
classes of ``actors/serving/openai/``) is not here: without it nothing starts.
"""

from __future__ import annotations

from outrider.cluster.borrowed import Borrowed, Project, Table
from outrider.cluster.installed import VLLM

PROJECT = Project("vLLM", VLLM, "0.32")

_LLM = "vllm.v1.engine.async_llm:AsyncLLM"
_OUTPUTS = "vllm.v1.engine.output_processor"
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_AHEAD = "vllm.v1.core.sched.async_scheduler:AsyncScheduler"
_GRAMMARS = "vllm.v1.structured_output:StructuredOutputManager"
_RAY = "vllm.v1.executor.ray_executor_v2"
_QUEUES = "vllm.distributed.device_communicators.shm_broadcast"
_ADAPTERS = "vllm.v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin"
_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_WORKER = "vllm.v1.worker.gpu_worker:Worker"
_MEDIA = "vllm.multimodal.media.connector:MediaConnector"
_BATCH = "vllm.v1.worker.gpu_input_batch:InputBatch"

REPLICA = Table(
    PROJECT,
    "actors/vllm_seam/target_engine.py",
    (
        Borrowed(
            f"{_LLM}.from_vllm_config",
            "makes the engine of a VllmConfig that knows our executor and scheduler",
            takes=("vllm_config", "stat_loggers"),
        ),
        Borrowed(f"{_LLM}.collective_rpc", "asks the ranks for their status", takes=("method",)),
        Borrowed(_LLM, "parts of the engine that we use one by one", also=("renderer", "model_config", "vllm_config")),
        Borrowed(
            f"{_LLM}.generate",
            "CheckedEngine and tracing stand in front of it",
            takes=("trace_headers", "reasoning_ended", "lora_request"),
        ),
        Borrowed(f"{_LLM}.add_lora", "adapters", exactly=("lora_request",)),
        Borrowed(f"{_LLM}.remove_lora", "likewise", exactly=("lora_id",)),
        Borrowed("vllm.lora.request:LoRARequest", "likewise", also=("lora_name", "lora_int_id", "lora_path")),
        Borrowed(
            "vllm.v1.engine.input_processor:InputProcessor.speculative_config",
            "nulled: vLLM refuses min_p and logit_bias under speculation by it, which our sampler knows (vllm#42744)",
            read_by=("vllm.v1.engine.input_processor:InputProcessor._validate_params",),
        ),
        Borrowed(
            f"{_OUTPUTS}:OutputProcessor.propagate_error",
            "ends the requests of an engine that stands still",
            takes=("e",),
            read_by=(f"{_LLM}._run_output_handler",),
        ),
        Borrowed(f"{_LLM}.errored", "by which it does"),
        Borrowed(f"{_OUTPUTS}:OutputProcessor.has_unfinished_requests", "whether the engine should be stepping"),
        Borrowed(
            "vllm.v1.engine.core_client:BackgroundResources.engine_dead",
            "set when the engine stands still: what is asked of it fails at once",
        ),
        Borrowed(
            "vllm.v1.engine.input_processor:InputProcessor.structured_outputs_config",
            "nulled: vLLM compiles half of a constraint by it, in the replica's event loop",
            read_by=("vllm.v1.engine.input_processor:InputProcessor._validate_params",),
        ),
        Borrowed(
            "vllm.v1.structured_output.backend_xgrammar:validate_xgrammar_grammar",
            "replaced: it compiles constraints on the replica's event loop, without any bound",
            takes=("sampling_params",),
            read_by=(
                "vllm.entrypoints.generate.base.protocol:validate_structural_tag_payload",
                "vllm.parser.abstract_parser:_xgrammar_supports",
            ),
        ),
        Borrowed(f"{_LLM}.input_processor", "whose settings are nulled", read_by=(f"{_LLM}.add_request",)),
        Borrowed(
            f"{_LLM}.output_processor",
            "becomes a RoundOutputProcessor (its __class__ is rewritten)",
            read_by=(f"{_LLM}._run_output_handler",),
        ),
        Borrowed(
            f"{_OUTPUTS}:OutputProcessor.process_outputs",
            "overridden: watched requests' rounds are noted",
            takes=("engine_core_outputs",),
        ),
        Borrowed(
            f"{_OUTPUTS}:OutputProcessor",
            "which requests run, by the engine's ids and by their callers'",
            also=("request_states", "external_req_ids"),
        ),
        Borrowed(
            f"{_OUTPUTS}:RequestState",
            "whose answer an output is part of, and what a request that waits comes to",
            also=(
                "parent_req",
                "external_req_id",
                "request_index",
                "is_prefilling",
                "prompt_len",
                "max_tokens_param",
            ),
        ),
        Borrowed(
            "vllm.v1.engine:EngineCoreOutput",
            "a round's tokens and counts",
            also=("request_id", "new_token_ids", "spec_decode_metrics"),
        ),
        Borrowed("vllm.v1.metrics.stats:RequestSpecDecodeMetrics", "counts", also=("histogram", "num_draft_tokens")),
        Borrowed(
            "vllm.v1.metrics.loggers:PrometheusStatLogger.gauge_lora_info",
            "nulled: a series for every set of adapters",
            read_by=("vllm.v1.metrics.loggers:PrometheusStatLogger.record",),
        ),
        Borrowed("vllm.v1.metrics.loggers:StatLoggerManager.stat_loggers", "where that is"),
        Borrowed(f"{_LLM}.logger_manager", "likewise"),
        Borrowed(
            "vllm.v1.metrics.loggers:StatLoggerBase.record",
            "overridden: the engine's load",
            takes=("scheduler_stats", "iteration_stats"),
        ),
        Borrowed("vllm.v1.metrics.loggers:StatLoggerBase.log_engine_initialized", "abstract there", exactly=()),
        Borrowed(
            "vllm.v1.metrics.stats:SchedulerStats",
            "the engine's load",
            also=("num_running_reqs", "num_waiting_reqs", "kv_cache_usage"),
        ),
        Borrowed(
            "vllm.v1.metrics.stats:IterationStats",
            "the engine's load, and the work that it does",
            also=("num_preempted_reqs", "num_prompt_tokens", "num_generation_tokens", "finished_requests"),
        ),
        Borrowed(
            "vllm.v1.metrics.stats:FinishedRequestStats",
            "how large a usual request is",
            also=("num_prompt_tokens", "num_generation_tokens"),
        ),
        Borrowed(
            "vllm.v1.metrics.stats:RequestStateStats",
            "a request's times",
            also=("queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts", "arrival_time"),
        ),
        Borrowed("vllm.exceptions:VLLMValidationError.parameter", "which field of a request vLLM refused"),
        Borrowed("vllm.config:SchedulerConfig.scheduler_cls", "set to ours, by its path"),
        Borrowed(
            "vllm.config:VllmConfig.max_concurrent_batches",
            "overridden (the configuration's __class__ is rewritten): two steps are in flight, or one in all stages",
            read_by=("vllm.v1.engine.core:EngineCore.__init__",),
        ),
        Borrowed(
            "vllm.multimodal.image:ALLOWED_IMAGE_FORMATS",
            "set to the formats that are taken",
            read_by=("vllm.multimodal.image:open_image",),
        ),
        Borrowed(
            "vllm.multimodal.image:open_image",
            "looks at a picture before it is decoded",
            takes=("fp",),
            read_by=("vllm.multimodal.media.image:ImageMediaIO.load_bytes",),
        ),
        Borrowed(
            f"{_MEDIA}.load_from_url_async",
            "overridden: pictures, and nothing else, within limits, from public addresses",
            takes=("url", "media_io", "fetch_timeout"),
            read_by=(f"{_MEDIA}.fetch_image_async", f"{_MEDIA}.fetch_audio_async", f"{_MEDIA}.fetch_video_async"),
        ),
        Borrowed(
            f"{_MEDIA}.load_from_url",
            "overridden: nothing is loaded on the event loop",
            takes=("url", "media_io", "fetch_timeout"),
            read_by=(f"{_MEDIA}.fetch_image", f"{_MEDIA}.fetch_audio", f"{_MEDIA}.fetch_video"),
        ),
        Borrowed(f"{_MEDIA}._load_data_url", "reads a data: URL", takes=("url", "media_io")),
        Borrowed(
            "vllm.multimodal.media.connector:MEDIA_CONNECTOR_REGISTRY",
            "where ours is registered",
            also=("name2class",),
        ),
        Borrowed("vllm.envs:VLLM_MEDIA_CONNECTOR", "by which ours is taken"),
        Borrowed("vllm.multimodal.media.image:ImageMediaIO.load_bytes", "decodes a picture", exactly=("data",)),
        Borrowed(
            "vllm.multimodal.registry:MultiModalRegistry.create_processor",
            "which media a model takes",
            takes=("model_config",),
        ),
        Borrowed("vllm.config:ModelConfig.is_multimodal_model", "whether it takes any"),
        Borrowed("vllm.config:ParallelConfig", "set", also=("placement_group", "distributed_executor_backend")),
        Borrowed("vllm.config:VllmConfig.additional_config", "our configuration goes to the ranks in it"),
    ),
)

EXECUTOR = Table(
    PROJECT,
    "actors/vllm_seam/executor.py",
    (
        *(
            Borrowed(f"{_RAY}:{name}", f"swapped while _init_executor runs: {why}", takes=takes, read_by=(reader,))
            for reader in (f"{_RAY}:RayExecutorV2._init_executor",)
            for name, why, takes in (
                ("initialize_ray_cluster", "a given cluster and placement group are taken", ("parallel_config",)),
                ("get_bundles_sorted_by_node", "a rank's bundle is planned", ()),
                ("build_actor_name", "a rank's actor name is planned", ("instance_id", "rank")),
                ("RayWorkerProc", "a rank is bound to its cores first", ("vllm_config", "rank")),
            )
        ),
        Borrowed(f"{_RAY}:RayExecutorV2._init_executor", "overridden", exactly=()),
        Borrowed(
            f"{_RAY}:RayExecutorV2._build_runtime_env",
            "overridden: the ranks' environment",
            exactly=(),
            read_by=(f"{_RAY}:RayExecutorV2._init_executor",),
        ),
        Borrowed(
            f"{_RAY}:RayExecutorV2._get_actor_resource_kwargs",
            "overridden: Ray has no device key for CPUs",
            exactly=(),
            read_by=(f"{_RAY}:RayExecutorV2._init_executor",),
        ),
        Borrowed(
            f"{_RAY}:RayExecutorV2.execute_model",
            "overridden: asks for drafts with the step",
            exactly=("scheduler_output", "non_block"),
        ),
        Borrowed(
            "vllm.v1.core.sched.output:SchedulerOutput.pending_structured_output_tokens",
            "whether a step that is sent ahead waits for tokens before its masks are made",
            read_by=("vllm.v1.engine.core:EngineCore.step_with_batch_queue",),
        ),
        Borrowed(
            f"{_RAY}:RayExecutorV2.sample_tokens",
            "overridden: likewise",
            exactly=("grammar_output", "non_block"),
        ),
        Borrowed(f"{_RAY}:RayExecutorV2.take_draft_token_ids", "overridden: drafts asked for before", exactly=()),
        Borrowed(
            f"{_RAY}:RayExecutorV2.collective_rpc",
            "asks rank 0 for drafts without waiting",
            takes=("method", "timeout", "unique_reply_rank", "non_block"),
        ),
        Borrowed(
            f"{_RAY}:RayExecutorV2",
            "its queues and sizes",
            also=("response_mqs", "output_rank", "world_size", "vllm_config"),
        ),
        Borrowed(
            f"{_RAY}:RayWorkerProc._init_message_queues",
            "overridden: the queue is told to sleep early",
            exactly=("input_shm_handle", "vllm_config"),
            read_by=("vllm.v1.executor.multiproc_executor:WorkerProc.__init__",),
        ),
        Borrowed(
            f"{_RAY}:RayWorkerProc.create_dist_init_method",
            "overridden: the ranks' store listens on one address",
            exactly=(),
            read_by=(f"{_RAY}:RayExecutorV2._init_executor",),
        ),
        Borrowed(
            f"{_RAY}:RayWorkerProc.get_node_and_physical_gpu_ids",
            "overridden: Ray has no device key for CPUs",
            exactly=(),
            read_by=(f"{_RAY}:RayExecutorV2._init_executor",),
        ),
        Borrowed(
            f"{_RAY}:RayWorkerProc",
            "its queue, its sizes, and where it keeps the store alive",
            also=("rpc_broadcast_mq", "_parallel_config", "_dist_init_store"),
        ),
        Borrowed("vllm.utils.network_utils:get_distributed_init_method", "the store's address", exactly=("ip", "port")),
        Borrowed(
            f"{_QUEUES}:MessageQueue._spin_condition",
            "how a queue's reader waits: told to sleep early on CPU",
            read_by=(f"{_QUEUES}:MessageQueue.acquire_read",),
        ),
        Borrowed(f"{_QUEUES}:SpinCondition.is_reader", "only readers wait"),
        Borrowed(
            f"{_QUEUES}:SpinCondition.busy_loop_s",
            "set: half a millisecond of spinning",
            read_by=(f"{_QUEUES}:SpinCondition.wait",),
        ),
        Borrowed(
            f"{_QUEUES}:SHM_READER_RECHECK_INTERVAL_MS",
            "set: a lost notification costs 5 ms",
            read_by=(f"{_QUEUES}:MessageQueue.ReadTimeoutWithWarnings.timeout_ms",),
        ),
        Borrowed("vllm.envs:VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "how long a step may take"),
    ),
)

SCHEDULER = Table(
    PROJECT,
    "actors/vllm_seam/scheduler.py",
    (
        Borrowed(
            f"{_SCHEDULER}.add_request",
            "overridden: a request's place in the line, and its deadline",
            exactly=("request",),
        ),
        Borrowed(f"{_SCHEDULER}.schedule", "overridden: late requests end, long prompts share a step"),
        Borrowed(
            f"{_SCHEDULER}.update_from_output",
            "overridden: requests without a next token end, counts leave with every round",
            exactly=("scheduler_output", "model_runner_output"),
        ),
        Borrowed(
            f"{_SCHEDULER}.update_draft_token_ids",
            "overridden: all requests' drafts are held against their grammars at the same time",
            exactly=("draft_token_ids",),
        ),
        Borrowed(
            f"{_SCHEDULER}.update_draft_token_ids_in_output",
            "overridden: likewise, in a step that was scheduled ahead",
            exactly=("draft_token_ids", "scheduler_output"),
            read_by=("vllm.v1.engine.core:EngineCore.step_with_batch_queue",),
        ),
        Borrowed(
            f"{_AHEAD}._update_after_schedule",
            "overridden: room for as many drafts as a request may have",
            exactly=("scheduler_output",),
            read_by=(f"{_SCHEDULER}.schedule",),
        ),
        Borrowed(
            "vllm.v1.request:Request",
            "what was counted ahead of a request is taken back",
            also=("spec_token_ids", "num_computed_tokens", "num_output_placeholders"),
        ),
        Borrowed(
            f"{_SCHEDULER}._make_cached_request_data",
            "overridden: stages before the last one hear of every accepted token",
            read_by=(f"{_SCHEDULER}.schedule",),
        ),
        Borrowed(f"{_SCHEDULER}.use_pp", "whether there are any"),
        Borrowed("vllm.v1.request:Request.all_token_ids", "these tokens"),
        Borrowed(f"{_SCHEDULER}.finish_requests", "ends late requests", takes=("request_ids", "finished_status")),
        Borrowed(
            f"{_SCHEDULER}.grammar_compile_error_reqs",
            "requests put in it end with an error",
            read_by=(f"{_SCHEDULER}.update_from_output",),
        ),
        Borrowed(
            _SCHEDULER,
            "its requests and settings",
            also=(
                "requests",
                "running",
                "vllm_config",
                "scheduler_config",
                "num_spec_tokens",
                "max_num_scheduled_tokens",
                "waiting",
            ),
        ),
        Borrowed("vllm.config:SchedulerConfig.disable_chunked_mm_input", "whether pictures run whole"),
        Borrowed("vllm.v1.request:Request.mm_features", "how long they are"),
        Borrowed("vllm.multimodal.inputs:MultiModalFeatureSpec.mm_position", "likewise"),
        Borrowed("vllm.multimodal.inputs:PlaceholderRange.length", "likewise"),
        Borrowed(
            "vllm.config:SchedulerConfig.long_prefill_token_threshold",
            "set before each step: what one prompt may take of it",
            read_by=(f"{_SCHEDULER}.schedule",),
        ),
        Borrowed(
            "vllm.v1.request:Request",
            "what a request's place is made of; priority is set",
            also=(
                "priority",
                "arrival_time",
                "num_prompt_tokens",
                "max_tokens",
                "is_prefill_chunk",
                "spec_decode_metrics",
                "sampling_params",
            ),
        ),
        Borrowed(
            "vllm.v1.request:Request.priority",
            "what the line is ordered by",
            read_by=("vllm.v1.request:Request.__lt__",),
        ),
        Borrowed("vllm.v1.request:RequestStatus.FINISHED_ABORTED", "how late requests end"),
        Borrowed(
            "vllm.v1.metrics.stats:RequestSpecDecodeMetrics",
            "copied with every round",
            takes=("num_spec_tokens", "histogram", "num_draft_tokens"),
        ),
        Borrowed(
            "vllm.v1.core.sched.output:SchedulerOutput",
            "a step: rewritten by the ranks where it was scheduled ahead",
            also=(
                "num_scheduled_tokens",
                "total_num_scheduled_tokens",
                "scheduled_spec_decode_tokens",
                "num_invalid_spec_tokens",
                "scheduled_cached_reqs",
            ),
        ),
        Borrowed(
            "vllm.v1.core.sched.output:CachedRequestData",
            "likewise, of requests that the ranks know",
            also=(
                "req_ids",
                "resumed_req_ids",
                "new_token_ids",
                "new_block_ids",
                "num_computed_tokens",
                "num_output_tokens",
            ),
        ),
        Borrowed(
            "vllm.v1.core.sched.output:GrammarOutput",
            "masks: those of rows that are there",
            also=("structured_output_request_ids", "grammar_bitmask", "num_acceptable_drafts"),
        ),
        Borrowed("vllm.v1.outputs:ModelRunnerOutput", "read", also=("num_nans_in_logits", "prompt_logprobs_dict")),
        Borrowed("vllm.v1.engine:EngineCoreOutput.spec_decode_metrics", "set"),
    ),
)

STRUCTURED_OUTPUT = Table(
    PROJECT,
    "actors/vllm_seam/structured_outputs.py",
    (
        Borrowed(
            f"{_SCHEDULER}.structured_output_manager",
            "becomes a GuardedStructuredOutputs (its __class__ is rewritten)",
            read_by=(f"{_SCHEDULER}.get_grammar_bitmask",),
        ),
        Borrowed(
            f"{_GRAMMARS}.grammar_init",
            "overridden: grammars are compiled in processes of their own",
            exactly=("request",),
            read_by=("vllm.v1.engine.core:EngineCore.preprocess_add_request",),
        ),
        Borrowed(
            f"{_GRAMMARS}.grammar_bitmask",
            "overridden: masks come from these processes",
            exactly=("requests", "structured_output_request_ids", "scheduled_spec_decode_tokens"),
            read_by=(f"{_SCHEDULER}.get_grammar_bitmask",),
        ),
        Borrowed(
            f"{_GRAMMARS}.clear_backend",
            "overridden: ends them",
            exactly=(),
            read_by=("vllm.v1.engine.core:EngineCore.shutdown",),
        ),
        Borrowed(
            f"{_GRAMMARS}._get_constraint_bounds",
            "from which token on a grammar holds, with a reasoning parser",
            takes=("request", "spec_tokens"),
        ),
        Borrowed(_GRAMMARS, "its settings", also=("vllm_config", "tokenizer")),
        Borrowed(
            "vllm.v1.structured_output.request:StructuredOutputRequest",
            "a request's constraint, and where its grammar, or a future of it, is put",
            also=("params", "grammar"),
        ),
        Borrowed("vllm.v1.structured_output.request:get_structured_output_key", "a constraint's kind and text"),
        Borrowed(
            "vllm.v1.structured_output.backend_xgrammar:XgrammarBackend",
            "what it makes of a tokenizer",
            also=("compiler",),
        ),
        Borrowed(
            "vllm.v1.structured_output.backend_xgrammar:has_xgrammar_unsupported_json_features",
            "schemas that would compile to something else than they say",
        ),
        Borrowed("vllm.v1.structured_output.utils:choice_as_grammar", "a choice is a grammar"),
        Borrowed("vllm.v1.structured_output.utils:grammar_is_likely_lark", "which syntax a grammar is in"),
        Borrowed("vllm.v1.structured_output.utils:strip_speculative_padding", "drafts without padding"),
        Borrowed("vllm.v1.request:Request", "a request's constraint", also=("structured_output_request",)),
        Borrowed("vllm.v1.outputs:DraftTokenIds", "drafts", also=("req_ids", "draft_token_ids")),
        Borrowed("vllm.sampling_params:SamplingParams.all_stop_token_ids", "what may end an answer"),
        Borrowed(
            "vllm.v1.engine:EngineCoreOutput.stop_reason",
            "set: why the constraint ended a request",
        ),
        Borrowed(
            "vllm.v1.engine:EngineCoreOutput", "its last tokens are dropped", also=("new_token_ids", "new_logprobs")
        ),
    ),
)

TARGET_RANK = Table(
    PROJECT,
    "actors/vllm_seam/target_runner.py, target_sampler.py, target_worker.py and stages.py",
    (
        Borrowed(
            f"{_WORKER}.model_runner",
            "becomes one with the round in it (its __class__ is rewritten)",
            read_by=(f"{_WORKER}.execute_model",),
        ),
        Borrowed(f"{_WORKER}.init_device", "overridden", exactly=()),
        Borrowed(f"{_WORKER}.execute_model", "overridden: samples in the same call", exactly=("scheduler_output",)),
        Borrowed(f"{_WORKER}.sample_tokens", "called early", exactly=("grammar_output",)),
        Borrowed(f"{_WORKER}.compile_or_warm_up_model", "overridden: verification warms up too", exactly=()),
        Borrowed(f"{_WORKER}.shutdown", "overridden: the link's keeper stops", exactly=()),
        Borrowed(f"{_WORKER}.load_model", "overridden: batches without adapters are spared their kernels on CPU"),
        *(
            Borrowed(f"vllm.lora.punica_wrapper.punica_base:PunicaWrapperBase.{name}", "replaced: likewise")
            for name in ("add_lora_linear", "add_lora_logits")
        ),
        Borrowed("vllm.lora.punica_wrapper.punica_base:PunicaWrapperBase.no_lora", "whether a batch has none"),
        Borrowed("vllm.lora.worker_manager:WorkerLoRAManager._adapter_manager", "where these are"),
        Borrowed("vllm.lora.model_manager:LoRAModelManager.punica_wrapper_mapping", "likewise"),
        Borrowed(
            f"{_RUNNER}._get_prompt_logprobs_dict",
            "overridden: the output head is told of a prompt's adapter",
            exactly=("hidden_states", "num_scheduled_tokens"),
        ),
        Borrowed(
            _RUNNER,
            "which prompts it is for, and whether there are adapters",
            also=("num_prompt_logprobs", "lora_config"),
        ),
        Borrowed(
            f"{_ADAPTERS}._set_active_loras",
            "tells the layers of the prompt's adapter",
            exactly=("prompt_lora_mapping", "token_lora_mapping", "lora_requests", "mapping_type"),
        ),
        Borrowed(
            _WORKER,
            "who the rank is",
            also=("rank", "device", "vllm_config", "model_config", "scheduler_config"),
        ),
        Borrowed(
            f"{_RUNNER}.execute_model",
            "overridden: the round begins",
            takes=("scheduler_output",),
            read_by=(f"{_WORKER}.execute_model",),
        ),
        Borrowed(
            f"{_RUNNER}.sample_tokens",
            "overridden: the round commits",
            exactly=("grammar_output",),
            read_by=(f"{_WORKER}.sample_tokens",),
        ),
        Borrowed(
            f"{_RUNNER}._sample",
            "overridden: the round chooses",
            exactly=("logits", "spec_decode_metadata"),
            read_by=(f"{_RUNNER}.sample_tokens",),
        ),
        Borrowed(
            f"{_RUNNER}.take_draft_token_ids",
            "overridden: the round takes its drafts",
            exactly=(),
            read_by=(f"{_WORKER}.take_draft_token_ids",),
        ),
        Borrowed(
            f"{_RUNNER}._input_fits_in_drafter",
            "overridden: the proposer in the process is never asked",
            exactly=("common_attn_metadata",),
            read_by=(f"{_RUNNER}.sample_tokens",),
        ),
        Borrowed(
            f"{_RUNNER}._copy_draft_token_ids_to_cpu",
            "overridden: nor are zeros proposed in its place",
            exactly=("scheduler_output", "zeros_only"),
            read_by=(f"{_RUNNER}.sample_tokens",),
        ),
        Borrowed(
            _RUNNER,
            "its batch and sampler",
            also=("input_batch", "sampler", "discard_request_mask", "device", "requests"),
        ),
        Borrowed(_BATCH, "the step's requests", also=("req_ids", "sampling_metadata")),
        Borrowed(
            _BATCH,
            "set: accepted tokens, on stages before the last one",
            also=("req_id_to_index", "token_ids_cpu", "is_token_ids", "num_tokens_no_spec"),
        ),
        Borrowed(
            "vllm.v1.core.sched.output:CachedRequestData.new_token_ids",
            "cut to what it was, where accepted tokens were put before it",
            read_by=(f"{_RUNNER}._update_states",),
        ),
        Borrowed(
            "vllm.v1.worker.gpu_input_batch:CachedRequestState",
            "what a stage knows of a request, and how long its text is where steps overlap",
            also=("num_tokens", "output_token_ids"),
        ),
        Borrowed(
            "vllm.v1.worker.gpu_model_runner:AsyncGPUModelRunnerOutput",
            "read later, where steps overlap, and its ids earlier where a choice needs them",
            also=("get_output", "async_copy_ready_event", "sampled_token_ids_cpu"),
        ),
        Borrowed("vllm.v1.outputs:AsyncModelRunnerOutput", "ours is one", also=("get_output",)),
        Borrowed(
            f"{_RUNNER}.drafter",
            "set on stages before the last one: vLLM makes none there",
            read_by=(f"{_RUNNER}._build_attention_metadata",),
        ),
        Borrowed(
            f"{_RUNNER}.intermediate_tensors",
            "made where vLLM has not: what a stage gets from the one before it",
            read_by=(f"{_RUNNER}.sync_and_gather_intermediate_tensors",),
        ),
        Borrowed(_RUNNER, "its size", also=("max_num_tokens", "num_spec_tokens", "model", "model_config")),
        Borrowed(
            "vllm.distributed.parallel_state:GroupCoordinator", "a rank's stage", also=("is_first_rank", "is_last_rank")
        ),
        Borrowed(
            f"{_BATCH}.generators",
            "emptied: vLLM would wind a seeded one back, which torch refuses on CPU",
            read_by=(f"{_BATCH}.add_request",),
        ),
        Borrowed(
            "vllm.v1.core.sched.output:SchedulerOutput",
            "what is scheduled",
            also=(
                "scheduled_new_reqs",
                "scheduled_cached_reqs",
                "num_scheduled_tokens",
                "total_num_scheduled_tokens",
                "scheduled_spec_decode_tokens",
                "finished_req_ids",
                "preempted_req_ids",
                "has_structured_output_requests",
            ),
        ),
        Borrowed(
            "vllm.v1.core.sched.output:NewRequestData",
            "a request that arrives",
            also=("req_id", "sampling_params", "prompt_token_ids", "prompt_embeds", "lora_request"),
        ),
        Borrowed("vllm.v1.core.sched.output:CachedRequestData.resumed_req_ids", "requests that were preempted"),
        Borrowed("vllm.v1.outputs:ModelRunnerOutput.num_nans_in_logits", "set: requests without a next token"),
        Borrowed("vllm.v1.outputs:ModelRunnerOutput", "committed tokens", also=("req_ids", "sampled_token_ids")),
        Borrowed("vllm.v1.outputs:DraftTokenIds", "made", exactly=("req_ids", "draft_token_ids")),
        Borrowed("vllm.v1.outputs:SamplerOutput", "made", exactly=("sampled_token_ids", "logprobs_tensors")),
        Borrowed(
            "vllm.v1.outputs:LogprobsTensors",
            "made anew in the host's memory",
            takes=("logprob_token_ids", "logprobs", "selected_token_ranks"),
        ),
        Borrowed(
            "vllm.v1.spec_decode.custom_class_proposer:create_custom_proposer",
            "loads RemoteProposer, which proposes nothing",
            takes=("vllm_config",),
        ),
        Borrowed(
            "vllm.v1.sample.sampler:Sampler.apply_logits_processors",
            "processors, on a row for each drafted position",
            exactly=("logits", "sampling_metadata", "predict_bonus_token"),
        ),
        Borrowed("vllm.v1.sample.sampler:Sampler.compute_logprobs", "logprobs", exactly=("logits",)),
        Borrowed(
            "vllm.v1.sample.sampler:Sampler.gather_logprobs",
            "logprobs",
            exactly=("logprobs", "num_logprobs", "token_ids"),
        ),
        Borrowed("vllm.v1.sample.sampler:Sampler.logprobs_mode", "must be raw"),
        Borrowed(
            "vllm.v1.sample.metadata:SamplingMetadata",
            "replaced by one of rows",
            takes=(
                "no_penalties",
                "prompt_token_ids",
                "frequency_penalties",
                "presence_penalties",
                "repetition_penalties",
                "output_token_ids",
                "allowed_token_ids_mask",
                "bad_words_token_ids",
                "logitsprocs",
                "spec_token_ids",
                "max_num_logprobs",
            ),
        ),
        Borrowed("vllm.v1.sample.logits_processor:LogitsProcessors", "made", takes=("logitsprocs",), also=("all",)),
        *(
            Borrowed(
                f"vllm.v1.sample.logits_processor.builtin:{name}",
                "made for the rows",
                takes=("device", "is_pin_memory"),
                also=("update_state",),
            )
            for name in ("MinTokensLogitsProcessor", "LogitBiasLogitsProcessor")
        ),
        Borrowed(
            "vllm.v1.sample.logits_processor.builtin:MinTokensLogitsProcessor._mask_stop_token_logits",
            "replaced: it has the host wait for the device",
            exactly=("logits", "logits_slice", "restore_logits_slice"),
        ),
        Borrowed(
            "vllm.v1.sample.logits_processor.builtin:MinTokensLogitsProcessor.neg_inf_tensor", "what it forbids with"
        ),
        Borrowed(
            "vllm.v1.sample.logits_processor.interface:BatchUpdate",
            "made: every row is a request",
            exactly=("batch_size", "removed", "added", "moved"),
        ),
        Borrowed("vllm.distributed.parallel_state:GroupCoordinator.broadcast", "committed ids", takes=("src",)),
    ),
)

DRAFT_ENGINE = Table(
    PROJECT,
    "actors/vllm_seam/draft_engine.py",
    (
        Borrowed(
            "vllm.v1.engine.core:EngineCore",
            "driven by hand",
            takes=("vllm_config", "executor_class", "log_stats"),
            also=("scheduler", "request_block_hasher", "model_executor", "shutdown"),
        ),
        Borrowed(_SCHEDULER, "where the KV cache is", also=("kv_cache_manager", "kv_cache_config")),
        Borrowed(
            "vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots",
            "blocks for rows, cached ones adopted at once",
            takes=(
                "request",
                "num_new_tokens",
                "num_new_computed_tokens",
                "new_computed_blocks",
                "num_lookahead_tokens",
            ),
        ),
        Borrowed(
            "vllm.v1.core.kv_cache_manager:KVCacheManager.get_computed_blocks", "prefix cache", exactly=("request",)
        ),
        Borrowed("vllm.v1.core.kv_cache_manager:KVCacheManager.get_block_ids", "tables", exactly=("request_id",)),
        Borrowed("vllm.v1.core.kv_cache_manager:KVCacheManager", "blocks", also=("block_pool", "free", "usage")),
        Borrowed("vllm.v1.core.block_pool:BlockPool.get_new_blocks", "a branch's own", exactly=("num_blocks",)),
        Borrowed("vllm.v1.core.block_pool:BlockPool.free_blocks", "a branch's own", takes=("ordered_blocks",)),
        Borrowed("vllm.v1.core.block_pool:BlockPool.get_num_free_blocks", "room for branches", exactly=()),
        Borrowed("vllm.v1.core.kv_cache_utils:KVCacheBlock.block_id", "a branch's own"),
        Borrowed(
            "vllm.v1.request:Request",
            "a sequence's, as the KV cache knows it",
            takes=("request_id", "prompt_token_ids", "sampling_params", "pooling_params", "block_hasher"),
            also=("append_output_token_ids", "num_computed_tokens", "status"),
        ),
        Borrowed("vllm.v1.request:RequestStatus.RUNNING", "set"),
        Borrowed(
            "vllm.v1.kv_cache_interface:KVCacheConfig",
            "what kinds of layers there are",
            also=("needs_kv_cache_zeroing", "kv_cache_groups"),
        ),
        Borrowed("vllm.platforms.interface:Platform.register_triton_kernel_overrides", "as vLLM's core", exactly=()),
        Borrowed(
            "vllm.v1.executor.uniproc_executor:UniProcExecutor.collective_rpc", "a step", takes=("method", "args")
        ),
    ),
)

DRAFT_RANK = Table(
    PROJECT,
    "actors/vllm_seam/draft_worker.py and paged_forward.py",
    (
        Borrowed(_WORKER, "a rank of the draft model", also=("model_runner", "rank")),
        Borrowed(
            _RUNNER,
            "its model and buffers, without its state of requests",
            also=(
                "model",
                "vllm_config",
                "device",
                "kv_caches",
                "kv_cache_config",
                "attn_groups",
                "input_batch",
                "cudagraph_dispatcher",
                "input_ids",
                "positions",
                "is_padding",
            ),
        ),
        Borrowed(
            f"{_ADAPTERS}._set_active_loras",
            "which rows are of which adapter",
            takes=("prompt_lora_mapping", "token_lora_mapping", "lora_requests"),
        ),
        Borrowed(f"{_WORKER}.add_lora", "the draft model's adapters", exactly=("lora_request",)),
        Borrowed(f"{_BATCH}.block_table", "block sizes"),
        Borrowed("vllm.v1.worker.block_table:BlockTable.block_size", "block sizes"),
        Borrowed(
            "vllm.v1.worker.utils:AttentionGroup.build_metadata",
            "attention's metadata of our rows",
            takes=("common_attn_metadata",),
        ),
        Borrowed("vllm.v1.worker.utils:AttentionGroup.layer_names", "which layers it is for"),
        Borrowed(
            "vllm.v1.attention.backend:CommonAttentionMetadata",
            "made of our rows",
            takes=(
                "query_start_loc",
                "query_start_loc_cpu",
                "seq_lens",
                "seq_lens_cpu_upper_bound",
                "num_reqs",
                "num_actual_tokens",
                "max_query_len",
                "max_seq_len",
                "block_table_tensor",
                "slot_mapping",
            ),
        ),
        Borrowed(
            "vllm.forward_context:set_forward_context",
            "around the model's forward pass",
            takes=(
                "attn_metadata",
                "vllm_config",
                "num_tokens",
                "cudagraph_runtime_mode",
                "batch_descriptor",
                "slot_mapping",
                "is_padding",
            ),
        ),
        Borrowed(
            "vllm.model_executor.models.interfaces:SupportsMultiModal.get_language_model",
            "the output head of a model that takes more than text",
            exactly=(),
        ),
        Borrowed(
            "vllm.v1.worker.utils:copy_kv_cache_blocks_inplace",
            "branches",
            exactly=("kv_caches", "num_blocks", "kv_cache_block_copies"),
        ),
        Borrowed(
            "vllm.v1.cudagraph_dispatcher:CudagraphDispatcher.dispatch",
            "graphs of the model's pieces, on GPUs",
            takes=("num_tokens", "has_lora", "num_active_loras", "valid_modes"),
        ),
        Borrowed("vllm.config:CUDAGraphMode", "likewise", also=("NONE", "PIECEWISE")),
        Borrowed(
            "vllm.model_executor.layers.logits_processor:LogitsProcessor",
            "what follows a cut output head",
            also=("soft_cap", "scale"),
        ),
    ),
)

TABLES = (REPLICA, EXECUTOR, SCHEDULER, STRUCTURED_OUTPUT, TARGET_RANK, DRAFT_ENGINE, DRAFT_RANK)
