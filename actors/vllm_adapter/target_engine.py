"""Runs the target's engine, vLLM's AsyncLLM, inside a replica.

`TargetEngine` turns a GenerationRequest into RoundOutputs, one per round. `EngineLoad` keeps the load that vLLM's
scheduler last reported, as one of AsyncLLM's statistics loggers, and `RoundOutputProcessor` records which round each
token came from.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.exceptions import VLLMClientError
from vllm.inputs import TokensPrompt
from vllm.lora.request import LoRARequest
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.metrics.loggers import PrometheusStatLogger, StatLoggerBase, StatLoggerManager
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

from outrider.actors.replica_calls import (
    GenerationRequest,
    ModelInfo,
    RequestError,
    RequestIdInUse,
    RoundOutput,
    TokenizeRequest,
    Tokens,
)
from outrider.actors.request_constraints import Mode
from outrider.actors.round.origins import RoundLog, SpeculationTotals
from outrider.actors.vllm_adapter.engine_requests import (
    is_of_request,
    refusal,
    round_outputs,
    sampling_params,
    traced_generate,
)
from outrider.actors.vllm_adapter.error_text import keep_client_text_out_of_logs
from outrider.actors.vllm_adapter.input_parameters import serve_all_parameters
from outrider.actors.vllm_adapter.prompts import PromptTokenizer
from outrider.actors.vllm_adapter.step_watchdog import WATCH_EVERY_S, StepWatchdog
from outrider.actors.vllm_adapter.updatable_llm import UpdatableLLM
from outrider.actors.vllm_adapter.work_meter import WorkMeter

logger = logging.getLogger("ray.serve.outrider.target")

VLLM_LIMITS = {"VLLM_MAX_N_SEQUENCES": "64", "VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0"}
"""Defaults of vLLM's environment variables: the most answers to one prompt, each of which takes a row of every step
(vLLM's default is 16384), and no redirects from allowed_media_domains to other hosts."""


class EngineLoad(StatLoggerBase):
    """Keeps running and waiting requests, KV usage and preemptions of one engine, from vLLM's statistics."""

    def __init__(self) -> None:
        self.running = self.waiting = 0
        self.kv_cache_usage = 0.0
        self.preemptions = 0
        self.work = WorkMeter()
        self.on_step: Callable[[], None] | None = None
        """Called with each output of the engine."""

    def snapshot(self) -> dict[str, Any]:
        return {
            "running": self.running,
            "waiting": self.waiting,
            "kv_cache_usage": self.kv_cache_usage,
            "preemptions": self.preemptions,
        }

    def record(self, scheduler_stats: Any, iteration_stats: Any, *args: Any, **kwargs: Any) -> None:
        """Records one step. vLLM calls it with each output of the engine, with or without tokens."""
        if self.on_step is not None:
            self.on_step()
        if scheduler_stats is not None:
            self.running = scheduler_stats.num_running_reqs
            self.waiting = scheduler_stats.num_waiting_reqs
            self.kv_cache_usage = scheduler_stats.kv_cache_usage
        if iteration_stats is not None:
            self.preemptions += iteration_stats.num_preempted_reqs
            self.work.stepped(
                iteration_stats.num_prompt_tokens + iteration_stats.num_generation_tokens,
                ((each.num_prompt_tokens, each.num_generation_tokens) for each in iteration_stats.finished_requests),
                busy=bool(self.running or self.waiting),
            )

    def log_engine_initialized(self) -> None:
        return None


class RoundOutputProcessor(OutputProcessor):
    """Records the rounds of watched requests. `log_rounds` makes it of AsyncLLM's OutputProcessor."""

    round_log: RoundLog

    def process_outputs(self, engine_core_outputs: list[EngineCoreOutput], *args: Any, **kwargs: Any) -> Any:
        watched = [(output, *key) for output in engine_core_outputs if (key := self._watched(output)) is not None]
        result = super().process_outputs(engine_core_outputs, *args, **kwargs)
        # By now tokens after a stop string are cut off, and the requests' consumers have not run yet.
        for output, request_id, index in watched:
            totals = _totals(output.spec_decode_metrics)
            self.round_log.note(request_id, index, len(output.new_token_ids), totals)
        return result

    def _watched(self, output: EngineCoreOutput) -> tuple[str, int] | None:
        """Returns the caller's id of a watched request, and which of its answers the output is for."""
        state = self.request_states.get(output.request_id)
        if state is None:
            return None
        owner = state.parent_req if state.parent_req is not None else state
        return (owner.external_req_id, state.request_index) if self.round_log.watches(owner.external_req_id) else None


def log_rounds(processor: OutputProcessor, log: RoundLog) -> None:
    """Makes the processor record in log the rounds of watched requests."""
    processor.__class__ = RoundOutputProcessor
    processor.round_log = log


def leave_out_lora_info(manager: StatLoggerManager | None) -> None:
    """Removes ``vllm:lora_requests_info``, which has a series for every set of adapters that ever ran together."""
    for stat_logger in [] if manager is None else manager.stat_loggers:
        if isinstance(stat_logger, PrometheusStatLogger):
            stat_logger.gauge_lora_info = None


def _totals(metrics: RequestSpecDecodeMetrics | None) -> SpeculationTotals | None:
    if metrics is None:
        return None
    accepted = sum(accepted * rounds for accepted, rounds in enumerate(metrics.histogram))
    return SpeculationTotals(sum(metrics.histogram), metrics.num_draft_tokens, accepted)


class TargetEngine:
    """Generates answers on vLLM's AsyncLLM.

    Construction loads the model, in processes and actors of its own (tens of seconds to minutes).

    chat_template: a template in place of the tokenizer's own. structured_output: as in ServingConfig. serves_lora:
    whether requests may name an adapter. report_cached_tokens: whether answers report how much of their prompt was
    cached, which reveals what others have asked.
    """

    _steps: StepWatchdog | None = None
    """Set by `watch_steps`."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        chat_template: str | None = None,
        structured_output: Mode = "all",
        serves_lora: bool = False,
        report_cached_tokens: bool = False,
    ) -> None:
        keep_client_text_out_of_logs()
        for name, limit in VLLM_LIMITS.items():
            os.environ.setdefault(name, limit)
        self._load = EngineLoad()
        self._llm = UpdatableLLM.from_vllm_config(vllm_config, stat_loggers=[lambda *_: self._load])
        serve_all_parameters(self._llm.input_processor, vllm_config)
        self._structured_output: Mode = structured_output
        self._report_cached_tokens = report_cached_tokens
        self.adapters: dict[str, LoRARequest] = {}
        """The target's LoRA adapters by name; the replica shares vLLM's OpenAI server's dict here."""

        if serves_lora:
            leave_out_lora_info(self._llm.logger_manager)
        self._max_model_len = self._llm.model_config.max_model_len
        self._vocab_size = self._llm.model_config.get_vocab_size()
        self._tokens = PromptTokenizer(self._llm.renderer, self._vocab_size, self._max_model_len, chat_template)
        self._rounds = RoundLog(speculating=vllm_config.speculative_config is not None)
        log_rounds(self._llm.output_processor, self._rounds)
        scheduler = vllm_config.scheduler_config
        self._seats = scheduler.max_num_active_seqs or scheduler.max_num_seqs
        self._watching: asyncio.Task[None] | None = None
        self._stands_still: str | None = None

    @property
    def llm(self) -> AsyncLLM:
        """Returns AsyncLLM, for vLLM's own serving classes."""
        return self._llm

    async def warm_up(self) -> None:
        """Runs a request, so that clients do not wait for lazy set-up.

        The first steps take tens of seconds on CPU ranks that share cores, and vLLM compiles functions at the first
        request for log-probabilities, while all other requests wait.
        """
        params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=1, prompt_logprobs=1)
        async for _ in self._llm.generate(TokensPrompt(prompt_token_ids=[0, 0]), params, "warm-up"):
            pass

    def watch_steps(self, least_s: float) -> None:
        """Starts to watch for a stall of least_s and MEDIANS times the usual step.

        The engine counts as dead then: its requests end, new ones are refused, and check_health says why.
        """
        watch = self._steps = StepWatchdog(least_s)
        self._load.on_step = watch.stepped
        self._watching = asyncio.create_task(self._watch(watch))

    async def _watch(self, watch: StepWatchdog) -> None:
        llm = self._llm
        reason = None
        while reason is None:
            await asyncio.sleep(WATCH_EVERY_S)
            reason = watch.tick(llm.output_processor.has_unfinished_requests() and not llm.is_held)
        logger.error("%s; Ray Serve will replace this replica", reason)
        self._stands_still = reason
        llm.engine_core.resources.engine_dead = True
        llm.output_processor.propagate_error(EngineDeadError())

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[RoundOutput, None]:
        """Yields one RoundOutput per round and answer, an answer's last one with finish_reason.

        Those of n answers are interleaved. Closing the generator aborts the request with all of its answers.

        Raises:
            RequestError: the model cannot serve the request.
            RequestIdInUse: another request has this id.
            TimeoutError: the request's deadline has passed.
            SamplingFailed: no next token can be chosen.
            ConnectionError: the engine is dead.
        """
        if self._rounds.watches(request.engine_id):
            raise RequestIdInUse(request.request_id)
        self._rounds.watch(request.engine_id)
        try:
            adapter = self._find_adapter(request.adapter)
            async with asyncio.timeout(request.seconds_left()):
                ids = await self._tokens.prompt_ids(request)
            params = sampling_params(request, len(ids), self._max_model_len, self._structured_output)
            async with aclosing(self._outputs(request, ids, params, adapter)) as outputs:
                async for output in outputs:
                    yield output
        finally:
            self._rounds.forget(request.engine_id)

    def _find_adapter(self, name: str | None) -> LoRARequest | None:
        """Returns None for None. Raises RequestError for a name that is not known."""
        if name is not None and name not in self.adapters:
            raise RequestError("adapter", "is not known here", f"send one of {sorted(self.adapters)}, or leave it out")
        return None if name is None else self.adapters[name]

    async def _outputs(
        self, request: GenerationRequest, ids: list[int], params: SamplingParams, adapter: LoRARequest | None
    ) -> AsyncGenerator[RoundOutput, None]:
        prompt = TokensPrompt(prompt_token_ids=ids)
        if request.cache_salt is not None:
            prompt["cache_salt"] = request.cache_salt
        # Reasoning is part of the answer here, so a constraint holds from the first token.
        stream = traced_generate(
            self._llm,
            prompt,
            params,
            request.engine_id,
            request.trace_headers,
            reasoning_ended=True,
            lora_request=adapter,
        )
        num_tokens: dict[int, int] = {}
        async with aclosing(stream):
            while True:
                try:
                    async with asyncio.timeout(request.seconds_left()):
                        output = await anext(stream)
                except StopAsyncIteration:
                    return
                except EngineDeadError as error:
                    raise ConnectionError("the engine is gone") from error
                except VLLMClientError as error:
                    raise refusal(error, request) from None
                except EngineGenerateError as error:
                    # vLLM wraps other errors in this one. A ValueError before any output is about the request.
                    if num_tokens or not isinstance(error.__cause__, ValueError):
                        kind = type(error.__cause__ or error).__name__  # its text may be the client's
                        raise RuntimeError(f"the engine failed: {kind}") from None  # see check_health
                    raise refusal(error.__cause__, request) from None
                cached = self._report_cached_tokens
                for each in round_outputs(output, request, num_tokens, self._rounds, report_cached_tokens=cached):
                    yield each
                if output.finished:
                    return

    async def abort(self, request_id: str, caller: int | None = None) -> bool:
        """Aborts a request, running or waiting, and returns whether it was here. Its last output says ``abort``.

        caller: whose request it is; None is any caller. A request of OpenAI's API is found by the id it came with and
        by that of its answer.
        """
        known = self._llm.output_processor.external_req_ids
        ids = [each for each, running in known.items() if running and is_of_request(each, request_id, caller)]
        if not ids:
            return False
        await self._llm.abort(ids)
        return True

    async def tokenize(self, request: TokenizeRequest) -> Tokens:
        """Tokenizes a text or a conversation. Raises RequestError."""
        return await self._tokens.tokenize(request)

    async def detokenize(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Returns the text of tokens. Raises RequestError."""
        return await self._tokens.detokenize(token_ids, skip_special_tokens)

    def model_info(self) -> ModelInfo:
        """Returns what clients may know of the model, without its speculation."""
        config = self._llm.model_config
        ends = config.try_get_generation_config().get("eos_token_id")
        if ends is None:
            ends = getattr(config.hf_text_config, "eos_token_id", None)
        return ModelInfo(
            max_model_len=self._max_model_len,
            vocab_size=self._vocab_size,
            dtype=str(config.dtype).removeprefix("torch."),
            architecture=config.architecture,
            tokenizer=self._tokens.name,
            has_chat_template=self._tokens.has_chat_template,
            eos_token_ids=tuple(ends) if isinstance(ends, list | tuple) else () if ends is None else (ends,),
        )

    async def call_ranks(self, method: str) -> list[Any]:
        """Calls a method of the ranks' worker between two steps, and returns its plain values in rank order."""
        replies: list[Any] = await self._llm.collective_rpc(method)
        return replies

    def load(self) -> dict[str, Any]:
        """Returns ``running`` and ``waiting`` requests, ``kv_cache_usage`` (0 to 1) and ``preemptions``."""
        return self._load.snapshot()

    def report(self) -> dict[str, float]:
        """Returns the fields of outrider.actors.serving.autoscaling.Report."""
        load, work = self._load, self._load.work
        states = [state for state in self._llm.output_processor.request_states.values() if state.is_prefilling]
        tokens = sum(work.expected_tokens(state.prompt_len, state.max_tokens_param) for state in states)
        # Some requests without a token are scheduled already and do not wait.
        waiting_tokens = tokens * min(1.0, load.waiting / len(states)) if states else 0.0
        return {
            "running": float(load.running),
            "waiting": float(load.waiting),
            "seats": float(self._seats),
            "waiting_tokens": waiting_tokens,
            "request_tokens": work.request_tokens,
            "tokens_per_s": work.tokens_per_s,
            "kv_cache_usage": float(load.kv_cache_usage),
            "step_ms": 0.0 if self._steps is None else 1e3 * self._steps.usual_s,
        }

    def kv_cache_tokens(self) -> int:
        """Returns how many tokens the KV cache holds, running and cached together."""
        cache = self._llm.vllm_config.cache_config
        return int((cache.num_gpu_blocks or 0) * cache.block_size)

    async def check_health(self) -> None:
        """Raises RuntimeError when the engine is dead or has stalled.

        An error of vLLM's own class would make Serve's controller import vLLM and torch to unpickle it: 460 MiB, and
        seconds in which it replaces no replica.
        """
        if self._stands_still is not None:
            raise RuntimeError(self._stands_still)
        try:
            await self._llm.check_health()
        except EngineDeadError as error:
            raise RuntimeError(str(error)) from None

    def shutdown(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        self._llm.shutdown()
