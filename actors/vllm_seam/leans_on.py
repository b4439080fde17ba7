"""Every name of vLLM's that this package overrides, patches or drives by hand, by the process that does.

Checked where that process starts (see cluster/borrowed.py), so that another vLLM is refused by the name that it lacks.
Written for vLLM 0.32. What is imported or called by its public API alone (AsyncLLM, SamplingParams, the serving
classes of ``actors/serving/openai/``) is not here: without it nothing starts.
"""

from __future__ import annotations

from outrider.cluster.borrowed import Project, Table, rows
from outrider.cluster.installed import VLLM

PROJECT = Project("vLLM", VLLM, "0.32")

_ADAPTERS = "vllm.v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin"
_AHEAD = "vllm.v1.core.sched.async_scheduler:AsyncScheduler"
_BATCH = "vllm.v1.worker.gpu_input_batch:InputBatch"
_CACHE = "vllm.v1.core.kv_cache_manager:KVCacheManager"
_CONFIG = "vllm.config"
_CORE = "vllm.v1.engine.core:EngineCore"
_GRAMMARS = "vllm.v1.structured_output:StructuredOutputManager"
_GROUP = "vllm.distributed.parallel_state:GroupCoordinator"
_INPUTS = "vllm.v1.engine.input_processor:InputProcessor"
_LLM = "vllm.v1.engine.async_llm:AsyncLLM"
_LOGGERS = "vllm.v1.metrics.loggers"
_OUTPUTS = "vllm.v1.engine.output_processor"
_POOL = "vllm.v1.core.block_pool:BlockPool"
_PROCESSORS = "vllm.v1.sample.logits_processor"
_PUNICA = "vllm.lora.punica_wrapper.punica_base:PunicaWrapperBase"
_QUEUES = "vllm.distributed.device_communicators.shm_broadcast"
_RAY = "vllm.v1.executor.ray_executor_v2"
_REQUEST = "vllm.v1.request:Request"
_RESULTS = "vllm.v1.outputs"
_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_SAMPLER = "vllm.v1.sample.sampler:Sampler"
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_STATS = "vllm.v1.metrics.stats"
_STEP = "vllm.v1.core.sched.output"
_WORKER = "vllm.v1.worker.gpu_worker:Worker"
_XGRAMMAR = "vllm.v1.structured_output.backend_xgrammar"

REPLICA = Table(
    PROJECT,
    "actors/vllm_seam/target_engine.py",
    rows(f"""
{_LLM}.from_vllm_config(vllm_config, stat_loggers, ...): makes the engine of a VllmConfig that knows our executor and
    scheduler
{_LLM}.collective_rpc(method, ...): asks the ranks for their status
{_LLM} [renderer, model_config, vllm_config]: parts of the engine that we use one by one
{_LLM}.generate(trace_headers, reasoning_ended, lora_request, ...): CheckedEngine and tracing stand in front of it
{_LLM}.add_lora(lora_request): adapters
{_LLM}.remove_lora(lora_id): likewise
vllm.lora.request:LoRARequest [lora_name, lora_int_id, lora_path]: likewise
{_INPUTS}.speculative_config < {_INPUTS}._validate_params: nulled: vLLM refuses min_p and logit_bias under speculation
    by it, which our sampler knows (vllm#42744)
{_OUTPUTS}:OutputProcessor.propagate_error(e, ...) < {_LLM}._run_output_handler: ends the requests of an engine that
    stands still
{_LLM}.errored: by which it does
{_OUTPUTS}:OutputProcessor.has_unfinished_requests: whether the engine should be stepping
vllm.v1.engine.core_client:BackgroundResources.engine_dead: set when the engine stands still: what is asked of it
    fails at once
{_LLM}.input_processor < {_LLM}.add_request: whose settings are nulled
{_LLM}.output_processor < {_LLM}._run_output_handler: becomes a RoundOutputProcessor (its __class__ is rewritten)
{_OUTPUTS}:OutputProcessor.process_outputs(engine_core_outputs, ...): overridden: watched requests' rounds are noted
{_OUTPUTS}:OutputProcessor [request_states, external_req_ids]: which requests run, by the engine's ids and by their
    callers'
{_OUTPUTS}:RequestState [parent_req, external_req_id, request_index, is_prefilling, prompt_len, max_tokens_param]:
    whose answer an output is part of, and what a request that waits comes to
vllm.v1.engine:EngineCoreOutput [request_id, new_token_ids, spec_decode_metrics]: a round's tokens and counts
{_STATS}:RequestSpecDecodeMetrics [histogram, num_draft_tokens]: counts
{_LOGGERS}:PrometheusStatLogger.gauge_lora_info < {_LOGGERS}:PrometheusStatLogger.record: nulled: a series for every
    set of adapters
{_LOGGERS}:StatLoggerManager.stat_loggers: where that is
{_LLM}.logger_manager: likewise
{_LOGGERS}:StatLoggerBase.record(scheduler_stats, iteration_stats, ...): overridden: the engine's load
{_LOGGERS}:StatLoggerBase.log_engine_initialized(): abstract there
{_STATS}:SchedulerStats [num_running_reqs, num_waiting_reqs, kv_cache_usage]: the engine's load
{_STATS}:IterationStats [num_preempted_reqs, num_prompt_tokens, num_generation_tokens, finished_requests]: the
    engine's load, and the work that it does
{_STATS}:FinishedRequestStats [num_prompt_tokens, num_generation_tokens]: how large a usual request is
{_STATS}:RequestStateStats [queued_ts, scheduled_ts, first_token_ts, last_token_ts, arrival_time]: a request's times
vllm.exceptions:VLLMValidationError.parameter: which field of a request vLLM refused
{_CONFIG}:SchedulerConfig.scheduler_cls: set to ours, by its path
{_CONFIG}:VllmConfig.max_concurrent_batches < {_CORE}.__init__: overridden (the configuration's __class__ is
    rewritten): two steps are in flight, or one in all stages
{_CONFIG}:ModelConfig.is_multimodal_model: whether it takes any
{_CONFIG}:ParallelConfig [placement_group, distributed_executor_backend]: set
{_CONFIG}:VllmConfig.additional_config: our configuration goes to the ranks in it
"""),
)

EXECUTOR = Table(
    PROJECT,
    "actors/vllm_seam/executor.py",
    rows(f"""
{_RAY}:initialize_ray_cluster(parallel_config, ...) < {_RAY}:RayExecutorV2._init_executor: swapped while
    _init_executor runs: a given cluster and placement group are taken
{_RAY}:get_bundles_sorted_by_node < {_RAY}:RayExecutorV2._init_executor: swapped while _init_executor runs: a rank's
    bundle is planned
{_RAY}:build_actor_name(instance_id, rank, ...) < {_RAY}:RayExecutorV2._init_executor: swapped while _init_executor
    runs: a rank's actor name is planned
{_RAY}:RayWorkerProc(vllm_config, rank, ...) < {_RAY}:RayExecutorV2._init_executor: swapped while _init_executor runs:
    a rank is bound to its cores first
{_RAY}:RayExecutorV2._init_executor(): overridden
{_RAY}:RayExecutorV2._build_runtime_env() < {_RAY}:RayExecutorV2._init_executor: overridden: the ranks' environment
{_RAY}:RayExecutorV2._get_actor_resource_kwargs() < {_RAY}:RayExecutorV2._init_executor: overridden: Ray has no device
    key for CPUs
{_RAY}:RayExecutorV2.execute_model(scheduler_output, non_block): overridden: asks for drafts with the step
{_STEP}:SchedulerOutput.pending_structured_output_tokens < {_CORE}.step_with_batch_queue: whether a step that is sent
    ahead waits for tokens before its masks are made
{_RAY}:RayExecutorV2.sample_tokens(grammar_output, non_block): overridden: likewise
{_RAY}:RayExecutorV2.take_draft_token_ids(): overridden: drafts asked for before
{_RAY}:RayExecutorV2.collective_rpc(method, timeout, unique_reply_rank, non_block, ...): asks rank 0 for drafts
    without waiting
{_RAY}:RayExecutorV2 [response_mqs, output_rank, world_size, vllm_config]: its queues and sizes
{_RAY}:RayWorkerProc._init_message_queues(input_shm_handle, vllm_config) <
    vllm.v1.executor.multiproc_executor:WorkerProc.__init__: overridden: the queue is told to sleep early
{_RAY}:RayWorkerProc.create_dist_init_method() < {_RAY}:RayExecutorV2._init_executor: overridden: the ranks' store
    listens on one address
{_RAY}:RayWorkerProc.get_node_and_physical_gpu_ids() < {_RAY}:RayExecutorV2._init_executor: overridden: Ray has no
    device key for CPUs
{_RAY}:RayWorkerProc [rpc_broadcast_mq, _parallel_config, _dist_init_store]: its queue, its sizes, and where it keeps
    the store alive
vllm.utils.network_utils:get_distributed_init_method(ip, port): the store's address
{_QUEUES}:MessageQueue._spin_condition < {_QUEUES}:MessageQueue.acquire_read: how a queue's reader waits: told to
    sleep early on CPU
{_QUEUES}:SpinCondition.is_reader: only readers wait
{_QUEUES}:SpinCondition.busy_loop_s < {_QUEUES}:SpinCondition.wait: set: half a millisecond of spinning
{_QUEUES}:SHM_READER_RECHECK_INTERVAL_MS < {_QUEUES}:MessageQueue.ReadTimeoutWithWarnings.timeout_ms: set: a lost
    notification costs 5 ms
vllm.envs:VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS: how long a step may take
"""),
)

SCHEDULER = Table(
    PROJECT,
    "actors/vllm_seam/scheduler.py",
    rows(f"""
{_SCHEDULER}.add_request(request): overridden: a request's place in the line, and its deadline
{_SCHEDULER}.schedule: overridden: late requests end, long prompts share a step
{_SCHEDULER}.update_from_output(scheduler_output, model_runner_output): overridden: requests without a next token end,
    counts leave with every round
{_AHEAD}._update_after_schedule(scheduler_output) < {_SCHEDULER}.schedule: overridden: room for as many drafts as a
    request may have
{_REQUEST} [spec_token_ids, num_computed_tokens, num_output_placeholders]: what was counted ahead of a request is
    taken back
{_SCHEDULER}._make_cached_request_data < {_SCHEDULER}.schedule: overridden: stages before the last one hear of every
    accepted token
{_SCHEDULER}.use_pp: whether there are any
{_REQUEST}.all_token_ids: these tokens
{_SCHEDULER}.finish_requests(request_ids, finished_status, ...): ends late requests
{_SCHEDULER}.grammar_compile_error_reqs < {_SCHEDULER}.update_from_output: requests put in it end with an error
{_SCHEDULER} [requests, running, vllm_config, scheduler_config, num_spec_tokens, max_num_scheduled_tokens, waiting]:
    its requests and settings
{_CONFIG}:SchedulerConfig.disable_chunked_mm_input: whether pictures run whole
{_REQUEST}.mm_features: how long they are
vllm.multimodal.inputs:MultiModalFeatureSpec.mm_position: likewise
vllm.multimodal.inputs:PlaceholderRange.length: likewise
{_CONFIG}:SchedulerConfig.long_prefill_token_threshold < {_SCHEDULER}.schedule: set before each step: what one prompt
    may take of it
{_REQUEST} [priority, num_prompt_tokens, max_tokens, is_prefill_chunk, spec_decode_metrics,
    sampling_params]: what a request's place is made of; priority is set
{_REQUEST}.priority < {_REQUEST}.__lt__: what the line is ordered by
vllm.v1.request:RequestStatus.FINISHED_ABORTED: how late requests end
{_STATS}:RequestSpecDecodeMetrics(num_spec_tokens, histogram, num_draft_tokens, ...): copied with every round
{_STEP}:SchedulerOutput [num_scheduled_tokens, total_num_scheduled_tokens, scheduled_spec_decode_tokens,
    num_invalid_spec_tokens, scheduled_cached_reqs]: a step: rewritten by the ranks where it was scheduled ahead
{_STEP}:CachedRequestData [req_ids, resumed_req_ids, new_token_ids, new_block_ids, num_computed_tokens,
    num_output_tokens]: likewise, of requests that the ranks know
{_STEP}:GrammarOutput [structured_output_request_ids, grammar_bitmask, num_acceptable_drafts]: masks: those of rows
    that are there
{_RESULTS}:ModelRunnerOutput [num_nans_in_logits, prompt_logprobs_dict]: read
vllm.v1.engine:EngineCoreOutput.spec_decode_metrics: set
"""),
)

STRUCTURED_OUTPUT = Table(
    PROJECT,
    "actors/vllm_seam/structured_outputs.py",
    rows(f"""
{_SCHEDULER}.structured_output_manager < {_SCHEDULER}.get_grammar_bitmask: becomes a TwoBackends (its __class__ is
    rewritten)
{_GRAMMARS}.grammar_init(request) < {_CORE}.preprocess_add_request: overridden: each request's grammar is compiled by
    its own backend
{_GRAMMARS}.backend < {_GRAMMARS}.grammar_bitmask: set: the backend that allocates the masks
vllm.sampling_params:StructuredOutputsParams._backend: the backend that vLLM picked for a request
vllm.v1.structured_output.request:StructuredOutputRequest.params: a request's constraint
vllm.v1.structured_output.backend_types:StructuredOutputBackend.allocate_token_bitmask(max_num_seqs): the size of masks
{_XGRAMMAR}:has_xgrammar_unsupported_json_features(schema): schemas that vLLM gives to guidance
vllm.v1.structured_output.backend_guidance:has_guidance_unsupported_json_features(schema): schemas that it would give
    to a third backend
{_REQUEST}.structured_output_request: likewise, of a request
"""),
)

TARGET_RANK = Table(
    PROJECT,
    "actors/vllm_seam/target_runner.py, target_sampler.py, target_worker.py and stages.py",
    rows(f"""
{_WORKER}.model_runner < {_WORKER}.execute_model: becomes one with the round in it (its __class__ is rewritten)
{_WORKER}.init_device(): overridden
{_WORKER}.execute_model(scheduler_output): overridden: samples in the same call
{_WORKER}.sample_tokens(grammar_output): called early
{_WORKER}.compile_or_warm_up_model(): overridden: verification warms up too
{_WORKER}.shutdown(): overridden: the link's keeper stops
{_WORKER}.load_model: overridden: batches without adapters are spared their kernels on CPU
{_PUNICA}.add_lora_linear: replaced: likewise
{_PUNICA}.add_lora_logits: replaced: likewise
{_PUNICA}.no_lora: whether a batch has none
vllm.lora.worker_manager:WorkerLoRAManager._adapter_manager: where these are
vllm.lora.model_manager:LoRAModelManager.punica_wrapper_mapping: likewise
{_RUNNER}._get_prompt_logprobs_dict(hidden_states, num_scheduled_tokens): overridden: the output head is told of a
    prompt's adapter
{_RUNNER} [num_prompt_logprobs, lora_config]: which prompts it is for, and whether there are adapters
{_ADAPTERS}._set_active_loras(prompt_lora_mapping, token_lora_mapping, lora_requests, mapping_type): tells the layers
    of the prompt's adapter
{_WORKER} [rank, device, vllm_config, model_config, scheduler_config]: who the rank is
{_RUNNER}.execute_model(scheduler_output, ...) < {_WORKER}.execute_model: overridden: the round begins
{_RUNNER}.sample_tokens(grammar_output) < {_WORKER}.sample_tokens: overridden: the round commits
{_RUNNER}._sample(logits, spec_decode_metadata) < {_RUNNER}.sample_tokens: overridden: the round chooses
{_RUNNER}.take_draft_token_ids() < {_WORKER}.take_draft_token_ids: overridden: the round takes its drafts
{_RUNNER}._input_fits_in_drafter(common_attn_metadata) < {_RUNNER}.sample_tokens: overridden: the proposer in the
    process is never asked
{_RUNNER}._copy_draft_token_ids_to_cpu(scheduler_output, zeros_only) < {_RUNNER}.sample_tokens: overridden: nor are
    zeros proposed in its place
{_RUNNER} [input_batch, sampler, discard_request_mask, device, requests]: its batch and sampler
{_BATCH} [req_ids, sampling_metadata]: the step's requests
{_BATCH} [req_id_to_index, token_ids_cpu, is_token_ids, num_tokens_no_spec]: set: accepted tokens, on stages before
    the last one
{_STEP}:CachedRequestData.new_token_ids < {_RUNNER}._update_states: cut to what it was, where accepted tokens were put
    before it
vllm.v1.worker.gpu_input_batch:CachedRequestState [num_tokens, output_token_ids]: what a stage knows of a request, and
    how long its text is where steps overlap
vllm.v1.worker.gpu_model_runner:AsyncGPUModelRunnerOutput [get_output, async_copy_ready_event, sampled_token_ids_cpu]:
    read later, where steps overlap, and its ids earlier where a choice needs them
{_RESULTS}:AsyncModelRunnerOutput [get_output]: ours is one
{_RUNNER}.drafter < {_RUNNER}._build_attention_metadata: set on stages before the last one: vLLM makes none there
{_RUNNER}.intermediate_tensors < {_RUNNER}.sync_and_gather_intermediate_tensors: made where vLLM has not: what a stage
    gets from the one before it
{_RUNNER} [max_num_tokens, num_spec_tokens, model, model_config]: its size
{_GROUP} [is_first_rank, is_last_rank]: a rank's stage
{_BATCH}.generators < {_BATCH}.add_request: emptied: vLLM would wind a seeded one back, which torch refuses on CPU
{_STEP}:SchedulerOutput [scheduled_new_reqs, scheduled_cached_reqs, num_scheduled_tokens, total_num_scheduled_tokens,
    scheduled_spec_decode_tokens, finished_req_ids, preempted_req_ids, has_structured_output_requests]: what is
    scheduled
{_STEP}:NewRequestData [req_id, sampling_params, prompt_token_ids, prompt_embeds, lora_request]: a request that
    arrives
{_STEP}:CachedRequestData.resumed_req_ids: requests that were preempted
{_RESULTS}:ModelRunnerOutput.num_nans_in_logits: set: requests without a next token
{_RESULTS}:ModelRunnerOutput [req_ids, sampled_token_ids]: committed tokens
{_RESULTS}:DraftTokenIds(req_ids, draft_token_ids): made
{_RESULTS}:SamplerOutput(sampled_token_ids, logprobs_tensors): made
{_RESULTS}:LogprobsTensors(logprob_token_ids, logprobs, selected_token_ranks, ...): made anew in the host's memory
vllm.v1.spec_decode.custom_class_proposer:create_custom_proposer(vllm_config, ...): loads RemoteProposer, which
    proposes nothing
{_SAMPLER}.apply_logits_processors(logits, sampling_metadata, predict_bonus_token): processors, on a row for each
    drafted position
{_SAMPLER}.compute_logprobs(logits): logprobs
{_SAMPLER}.gather_logprobs(logprobs, num_logprobs, token_ids): logprobs
{_SAMPLER}.logprobs_mode: must be raw
vllm.v1.sample.metadata:SamplingMetadata(no_penalties, prompt_token_ids, frequency_penalties, presence_penalties,
    repetition_penalties, output_token_ids, allowed_token_ids_mask, bad_words_token_ids, logitsprocs, spec_token_ids,
    max_num_logprobs, ...): replaced by one of rows
{_PROCESSORS}:LogitsProcessors(logitsprocs, ...) [all]: made
{_PROCESSORS}.builtin:MinTokensLogitsProcessor(device, is_pin_memory, ...) [update_state]: made for the rows
{_PROCESSORS}.builtin:LogitBiasLogitsProcessor(device, is_pin_memory, ...) [update_state]: made for the rows
{_PROCESSORS}.builtin:MinTokensLogitsProcessor._mask_stop_token_logits(logits, logits_slice, restore_logits_slice):
    replaced: it has the host wait for the device
{_PROCESSORS}.builtin:MinTokensLogitsProcessor.neg_inf_tensor: what it forbids with
{_PROCESSORS}.interface:BatchUpdate(batch_size, removed, added, moved): made: every row is a request
{_RUNNER}._dummy_sampler_run(hidden_states) < {_RUNNER}.profile_run, {_WORKER}.compile_or_warm_up_model: overridden:
    our sampler's memory is profiled, and what it compiles is compiled before requests
{_RUNNER} [max_num_reqs]: how many requests there are at most in the largest step
{_GROUP}.broadcast(src, ...): committed ids
{_GROUP}.broadcast_object(obj, ...): rank 0's drafts
{_GROUP}.mq_broadcaster < {_GROUP}.broadcast_object: the queue that they go through is told to sleep early
"""),
)

DRAFT_ENGINE = Table(
    PROJECT,
    "actors/vllm_seam/draft_engine.py",
    rows(f"""
{_CORE}(vllm_config, executor_class, log_stats, ...) [scheduler, request_block_hasher, model_executor, shutdown]:
    driven by hand
{_SCHEDULER} [kv_cache_manager, kv_cache_config]: where the KV cache is
{_CACHE}.allocate_slots(request, num_new_tokens, num_new_computed_tokens, new_computed_blocks, num_lookahead_tokens,
    ...): blocks for rows, cached ones adopted at once
{_CACHE}.get_computed_blocks(request): prefix cache
{_CACHE}.get_block_ids(request_id): tables
{_CACHE} [block_pool, free, usage, empty_kv_cache_blocks]: blocks
{_CACHE} [coordinator]: what a text lacks
vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.get_num_blocks_to_allocate(request_id, num_tokens,
    new_computed_blocks, num_encoder_tokens, total_computed_tokens, num_local_computed_tokens, num_tokens_main_model,
    apply_admission_cap, ...): likewise
{_POOL}.get_new_blocks(num_blocks): a branch's own
{_POOL}.free_blocks(ordered_blocks, ...): a branch's own
{_POOL}.get_num_free_blocks(): room for branches
vllm.v1.core.kv_cache_utils:KVCacheBlock.block_id: a branch's own
{_REQUEST}(request_id, prompt_token_ids, sampling_params, pooling_params, block_hasher, ...) [append_output_token_ids,
    num_computed_tokens, status]: a sequence's, as the KV cache knows it
vllm.v1.request:RequestStatus.RUNNING: set
vllm.v1.kv_cache_interface:KVCacheConfig [needs_kv_cache_zeroing, kv_cache_groups]: what kinds of layers there are
vllm.platforms.interface:Platform.register_triton_kernel_overrides(): as vLLM's core
vllm.v1.executor.uniproc_executor:UniProcExecutor.collective_rpc(method, args, ...): a step
"""),
)

DRAFT_RANK = Table(
    PROJECT,
    "actors/vllm_seam/draft_worker.py, paged_forward.py and draft_graphs.py",
    rows(f"""
{_WORKER} [model_runner, rank]: a rank of the draft model
{_RUNNER} [model, vllm_config, device, kv_caches, kv_cache_config, attn_groups, input_batch, cudagraph_dispatcher,
    input_ids, positions, is_padding, query_start_loc, seq_lens]: its model and buffers, without its state of requests
{_ADAPTERS}._set_active_loras(prompt_lora_mapping, token_lora_mapping, lora_requests, ...): which rows are of which
    adapter
{_WORKER}.add_lora(lora_request): the draft model's adapters
{_BATCH}.block_table: block sizes
vllm.v1.worker.block_table:BlockTable.block_size: block sizes
vllm.v1.worker.block_table:BlockTable.get_device_tensor(num_reqs): the block tables that CUDA graphs read
vllm.v1.worker.block_table:BlockTable.slot_mapping: the KV slots that they write to
vllm.v1.utils:CpuGpuBuffer.gpu: where the device has them, token ids and the beginnings of rows
vllm.v1.attention.backends.utils [NULL_BLOCK_ID, PAD_SLOT_ID]: what rows of padding have
vllm.v1.worker.utils:AttentionGroup.build_metadata(common_attn_metadata, ...): attention's metadata of our rows
vllm.v1.worker.utils:AttentionGroup.layer_names: which layers it is for
vllm.v1.attention.backend:CommonAttentionMetadata(query_start_loc, query_start_loc_cpu, seq_lens,
    seq_lens_cpu_upper_bound, num_reqs, num_actual_tokens, max_query_len, max_seq_len, block_table_tensor,
    slot_mapping, positions, ...): made of our rows
vllm.forward_context:set_forward_context(attn_metadata, vllm_config, num_tokens, cudagraph_runtime_mode,
    batch_descriptor, slot_mapping, is_padding, ...): around the model's forward pass
vllm.model_executor.models.interfaces:SupportsMultiModal.get_language_model(): the output head of a model that takes
    more than text
vllm.v1.worker.utils:copy_kv_cache_blocks_inplace(kv_caches, num_blocks, kv_cache_block_copies): branches
vllm.v1.cudagraph_dispatcher:CudagraphDispatcher.dispatch(num_tokens, uniform_decode, has_lora, num_active_loras,
    valid_modes, ...): which of the graphs that are captured a step uses, on GPUs
vllm.v1.cudagraph_dispatcher:CudagraphDispatcher.cudagraph_mode: whether there are any
vllm.forward_context:BatchDescriptor [num_tokens, num_reqs]: a graph's size
{_CONFIG}:CUDAGraphMode [NONE, PIECEWISE, FULL]: likewise
vllm.model_executor.layers.logits_processor:LogitsProcessor [soft_cap, scale]: what follows a cut output head
"""),
)

TABLES = (REPLICA, EXECUTOR, SCHEDULER, STRUCTURED_OUTPUT, TARGET_RANK, DRAFT_ENGINE, DRAFT_RANK)
