"""Wraps AsyncLLM for vLLM's OpenAI server, and applies this deployment's limits to each request.

vLLM's serving classes check requests in their own words. This adds what they cannot know: numbers that the ranks and
the link cannot take, the kinds of constraints that the deployment serves, speculation settings, owner and deadline.
"""

from __future__ import annotations

import copy
from collections.abc import AsyncGenerator
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from vllm import SamplingParams
from vllm.exceptions import GracefulHTTPError, RetryableRequestError, VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from outrider.actors.replica_calls import LIMITS, HttpCall, RequestError
from outrider.actors.request_constraints import Mode
from outrider.actors.request_ids import scoped_id
from outrider.actors.round.request import EXTRA_ARGS_KEY, check_for_ranks
from outrider.actors.serving.authentication import tenant_salt
from outrider.actors.serving.co_located import check_co_located_params
from outrider.actors.vllm_adapter.engine_args import on_gpu
from outrider.actors.vllm_adapter.engine_requests import blamed_by_ranks, traced_generate
from outrider.actors.vllm_adapter.structured_outputs import check_constraint
from outrider.cluster.config import ServingConfig
from outrider.cluster.link.messages import MessageError
from outrider.cluster.modes import BY_NAME

ENABLED, NUM_TOKENS, VERIFICATION = (
    f"speculation.{name}" for name in ("enabled", "num_speculative_tokens", "verification")
)
"""Keys of ``vllm_xargs``, whose values are strings, numbers or lists."""


@dataclass
class CallState:
    """Holds the state of one HTTP call while vLLM's app answers it."""

    call: HttpCall
    engine_ids: set[str] = field(default_factory=set)
    """Ids of the call's requests in the engine."""


CURRENT_CALL: ContextVar[CallState | None] = ContextVar("the HTTP call that this task answers", default=None)


class OpenAIEngine:
    """Limits ``generate`` and ``abort``, and passes everything else on to AsyncLLM."""

    def __init__(
        self,
        llm: AsyncLLM,
        num_speculative_tokens: int,
        structured_output: Mode,
        co_located: str | None,
        limits: ServingConfig,
    ):
        """Wraps llm.

        Args:
            llm: The replica's engine.
            num_speculative_tokens: The deployment's K; 0 without a drafter.
            structured_output: Kinds of constraints that are served.
            co_located: Method by which vLLM drafts inside the engine; None where it does not.
            limits: Bounds of max_tokens.
        """
        self._llm, self._k, self._limits = llm, num_speculative_tokens, limits
        self._structured_output, self._co_located = structured_output, co_located

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """See AsyncLLM.generate. Raises VLLMValidationError at once for what this deployment does not serve."""
        state = CURRENT_CALL.get()
        call = None if state is None else state.call
        params = copy.copy(sampling_params)
        params.extra_args = self._extra_args(params.extra_args or {}, call)
        if call is not None:
            self._limit_tokens(params, call)
        self._check(params)
        if call is not None and call.tenant:
            prompt = {**prompt, "cache_salt": tenant_salt(call.tenant, prompt.get("cache_salt"))}
        # A completion is one text: its constraint holds for all of it. A chat says where its reasoning ends, and the
        # engine reads it in the prompt of a response.
        if options.get("reasoning_parser_kwargs") is None:
            options.setdefault("reasoning_ended", True)
        return self._outputs(prompt, params, _scoped(request_id), options, state)

    async def abort(self, request_id: str) -> None:
        """See AsyncLLM.abort."""
        await self._llm.abort(_scoped(request_id))

    def _extra_args(self, asked: dict[str, Any], call: HttpCall | None) -> dict[str, Any]:
        """Moves speculation settings and the call's owner, tenant and remaining time under EXTRA_ARGS_KEY."""
        ours: dict[str, Any] = {}
        if (k := self._num_tokens(asked)) is not None:
            ours["num_speculative_tokens"] = k
        if (verification := asked.get(VERIFICATION)) is not None:
            if verification not in BY_NAME:
                raise _refused(VERIFICATION, f"must be one of {', '.join(BY_NAME)}")
            ours["verification"] = verification
        if call is not None:
            ours |= {name: value for name in ("caller", "tenant") if (value := getattr(call, name))}
            if (left_s := call.seconds_left()) is not None:
                ours["timeout_s"] = left_s
        kept = {name: value for name, value in asked.items() if not name.startswith("speculation.")}
        kept.pop(EXTRA_ARGS_KEY, None)
        if unknown := [
            name for name in asked if name not in (*kept, ENABLED, NUM_TOKENS, VERIFICATION, EXTRA_ARGS_KEY)
        ]:
            raise _refused(unknown[0], f"is not known; send {ENABLED}, {NUM_TOKENS} or {VERIFICATION}")
        return {**kept, EXTRA_ARGS_KEY: ours} if ours else kept

    def _num_tokens(self, asked: dict[str, Any]) -> int | None:
        """Returns how many tokens a round may draft for the request; None: as many as the deployment does."""
        enabled, k = asked.get(ENABLED), asked.get(NUM_TOKENS)
        if enabled is not None and enabled not in (0, 1, "true", "false"):
            raise _refused(ENABLED, "must be 1 or 0")
        if k is not None and (not isinstance(k, int) or not 0 <= k <= self._k):
            raise _refused(NUM_TOKENS, f"must be a whole number from 0 to {self._k}")
        if enabled in (0, "false"):
            return 0
        return k if k is None else int(k)

    def _limit_tokens(self, params: SamplingParams, call: HttpCall) -> None:
        """Applies ``limits`` to max_tokens. Raises VLLMValidationError for a client's number above the greatest."""
        most, if_unset = self._limits.greatest_max_tokens, self._limits.max_tokens_if_unset
        wanted = params.max_tokens
        if if_unset is not None and not (call.routed is not None and call.routed.sets_max_tokens):
            params.max_tokens = if_unset if wanted is None else min(wanted, if_unset)
        elif most is not None and (wanted is None or wanted > most):
            problem = f"max_tokens is above serving.greatest_max_tokens, {most}"
            raise VLLMValidationError(problem, parameter="max_tokens")

    def _check(self, params: SamplingParams) -> None:
        try:
            check_for_ranks(params)
        except MessageError as error:
            raise VLLMValidationError(error.problem, parameter=blamed_by_ranks(error, params)) from None
        except (ValueError, KeyError) as error:
            raise VLLMValidationError(str(error), parameter=VERIFICATION) from None
        structured = params.structured_outputs
        try:
            if structured is not None and not structured.all_constraints_none():
                # vLLM makes structural tags of tools, whose parts are JSON schemas.
                by_tools = self._structured_output == "json" and structured.structural_tag is not None
                check_constraint(structured, "structured_outputs", "all" if by_tools else self._structured_output)
            if self._co_located is not None:
                check_co_located_params(params, self._co_located, on_gpu=on_gpu())
        except RequestError as error:
            raise VLLMValidationError(f"{error.problem}; {error.fix}", parameter=error.field) from None

    async def _outputs(
        self, prompt: Any, params: SamplingParams, request_id: str, options: dict[str, Any], state: CallState | None
    ) -> AsyncGenerator[RequestOutput, None]:
        started = False
        if state is not None:
            state.engine_ids.add(request_id)
        async with aclosing(traced_generate(self._llm, prompt, params, request_id, **options)) as outputs:
            try:
                async for output in outputs:
                    _check_reasons(output, params, state)
                    if state is None or not state.call.tenant:
                        output.num_cached_tokens = None  # it tells what others have asked
                    started = True
                    yield output
            except EngineDeadError:
                raise RetryableRequestError("the target's engine is gone; retry") from None
            except EngineGenerateError as error:
                # vLLM wraps what it did not raise as a validation error. Before any output it is about the request.
                if started or not isinstance(error.__cause__, (ValueError, OverflowError)):
                    raise
                raise VLLMValidationError(str(error.__cause__).partition("\n")[0]) from None


def _scoped(request_id: str) -> str:
    """Returns the engine's id of a request of the running call: ids of two owners never meet."""
    state = CURRENT_CALL.get()
    return request_id if state is None else scoped_id(state.call.caller, request_id)


def _check_reasons(output: RequestOutput, params: SamplingParams, state: CallState | None) -> None:
    """Raises an error of the request's where vLLM's server would report a failure of the engine.

    VLLMValidationError: its own limits left no token to choose. GracefulHTTPError: its deadline passed.
    """
    for completion in output.outputs:
        if completion.finish_reason == "error" and (asked := _may_leave_no_token(params)):
            raise VLLMValidationError(f"{', '.join(asked)} left no token to choose", parameter=asked[0])
        left_s = None if state is None else state.call.seconds_left()
        if completion.finish_reason == "abort" and left_s is not None and left_s <= 0:
            raise GracefulHTTPError("aborted when its deadline passed", HTTPStatus.REQUEST_TIMEOUT)


def _may_leave_no_token(params: SamplingParams) -> list[str]:
    """Returns the request's parameters that can forbid every token, as far as it gives them another value than vLLM."""
    given = {name: getattr(params, name) for name in LIMITS}
    return [name for name, value in given.items() if value and (name, value) != ("repetition_penalty", 1.0)]


def _refused(key: str, problem: str) -> VLLMValidationError:
    return VLLMValidationError(f"{key} {problem}", parameter=f"vllm_xargs.{key}")
