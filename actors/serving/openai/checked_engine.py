"""The target's AsyncLLM as vLLM's serving classes get to see it: what would end the engine is refused, and what went
wrong is told in exceptions that they know the status of."""

from __future__ import annotations

import copy
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import ExitStack, aclosing, contextmanager
from contextvars import ContextVar
from http import HTTPStatus
from typing import Any

from vllm import SamplingParams
from vllm.exceptions import GracefulHTTPError, RetryableRequestError, VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from outrider.actors.openai_calls import TokensUsed
from outrider.actors.replica_calls import LIMITS, Deadline, RequestError
from outrider.actors.request_constraints import Mode
from outrider.actors.request_costs import check_prompt_logprobs, longest_in_one_piece
from outrider.actors.request_ids import scoped_id
from outrider.actors.round.request import EXTRA_ARGS_KEY, check_for_ranks
from outrider.actors.serving.co_located import check_co_located_params
from outrider.actors.vllm_seam.adapters import Adapters
from outrider.actors.vllm_seam.engine_args import on_gpu
from outrider.actors.vllm_seam.engine_requests import blamed_by_ranks, problem_in, traced_generate
from outrider.actors.vllm_seam.structured_outputs import check_constraint
from outrider.cluster.limits import LimitsConfig
from outrider.cluster.link.messages import MessageError

CONSTRAINT = "structured_outputs"
"""As vLLM calls it. A client that wrote response_format, or tools, is told of that: see serving.py."""


class Tally:
    """Tokens that one OpenAI request has cost so far, all its prompts and answers together."""

    def __init__(self) -> None:
        self._prompt = self._completion = 0
        self.last: RequestOutput | None = None
        """What the engine last said."""

    @property
    def uncounted(self) -> int:
        return self._prompt + self._completion

    def add(self, output: RequestOutput, *, first: bool) -> None:
        """output: a delta, or all of an answer at its end."""
        self.last = output
        if first:
            self._prompt += len(output.prompt_token_ids or ())
        self._completion += sum(len(completion.token_ids) for completion in output.outputs)

    def take(self) -> TokensUsed:
        """Since the last time."""
        used, self._prompt, self._completion = TokensUsed(self._prompt, self._completion), 0, 0
        return used


TALLY: ContextVar[Tally | None] = ContextVar("what the OpenAI request of this task has cost", default=None)


class CheckedEngine:
    """Everything but ``generate`` is AsyncLLM's own."""

    def __init__(
        self,
        llm: AsyncLLM,
        co_located: str | None = None,
        structured_output: Mode = "all",
        adapters: Adapters | None = None,
        limits: LimitsConfig | None = None,
    ) -> None:
        """co_located: the method by which vLLM drafts in the engine itself; None where it does not. structured_output:
        see ServingConfig. adapters: that requests' lora_request is of. limits None: the defaults."""
        self._llm, self._co_located, self._structured_output = llm, co_located, structured_output
        self._adapters, self._limits = adapters, limits or LimitsConfig()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """As AsyncLLM's. Raises VLLMValidationError at once, and not with the first output, for what the ranks could
        not take."""
        check_what_ranks_take(sampling_params)
        check_structured(sampling_params, self._structured_output)
        check_logprobs(prompt, sampling_params, self._limits)
        end_in_one_piece(sampling_params, self._limits)
        if self._co_located is not None:
            check_for_co_located(sampling_params, self._co_located)
        caller = (sampling_params.extra_args or {}).get(EXTRA_ARGS_KEY, {}).get("caller", 0)
        request_id = scoped_id(caller, request_id)
        params, deadline = _with_time_left(sampling_params)
        # vLLM's class for chats says where reasoning ends; that for responses leaves it to the engine, which reads the
        # prompt; a completion is one text, and its constraint holds for all of it.
        if options.get("reasoning_parser_kwargs") is None:
            options.setdefault("reasoning_ended", True)
        return self._outputs(prompt, params, request_id, options, deadline, TALLY.get() or Tally())

    async def _outputs(
        self,
        prompt: Any,
        params: SamplingParams,
        request_id: str,
        options: dict[str, Any],
        deadline: Deadline | None,
        tally: Tally,
    ) -> AsyncGenerator[RequestOutput, None]:
        started = False
        with self._held(options.get("lora_request")):
            async with aclosing(traced_generate(self._llm, prompt, params, request_id, **options)) as outputs:
                try:
                    async for output in outputs:
                        check_reasons(output, params, deadline)
                        tally.add(output, first=not started)
                        started = True
                        yield output
                except VLLMValidationError as error:  # of a constraint vLLM does not say which field it is
                    if started or error.parameter is not None or params.structured_outputs is None:
                        raise
                    raise VLLMValidationError(problem_in(error), parameter=CONSTRAINT) from None
                except EngineDeadError:
                    raise RetryableRequestError("the target's engine is gone; retry") from None
                except MemoryError:  # vLLM's classes would call it a fault of the server's, in an event of a stream
                    raise RetryableRequestError("the replica has no memory left; retry") from None
                except EngineGenerateError as error:
                    # vLLM wraps what it did not raise as a validation error. Before any output it is about the request.
                    if started or not isinstance(error.__cause__, (ValueError, OverflowError)):
                        raise
                    raise VLLMValidationError(_first_line(error.__cause__)) from None

    @contextmanager
    def _held(self, lora_request: LoRARequest | None) -> Iterator[None]:
        """Raises VLLMValidationError for one that has been unloaded."""
        with ExitStack() as stack:
            if self._adapters is not None:
                with in_vllms_words("model"):
                    stack.enter_context(self._adapters.using(lora_request))
            yield


@contextmanager
def in_vllms_words(parameter: str | None = None) -> Iterator[None]:
    """Raises VLLMValidationError in place of RequestError. parameter None: the field that this names."""
    try:
        yield
    except RequestError as error:
        raise VLLMValidationError(f"{error.problem}; {error.fix}", parameter=parameter or error.field) from None


def check_what_ranks_take(params: SamplingParams) -> None:
    """Raises VLLMValidationError."""
    try:
        check_for_ranks(params)
    except MessageError as error:
        raise VLLMValidationError(error.problem, parameter=blamed_by_ranks(error, params)) from None
    except (ValueError, KeyError) as error:
        raise VLLMValidationError(str(error), parameter="speculation.verification") from None


def check_structured(params: SamplingParams, mode: Mode) -> None:
    """Raises VLLMValidationError for a constraint that is not served. vLLM makes structural tags of tools: what is in
    them is JSON schemas, which the mode ``json`` takes; one that a client writes is refused by serving.py."""
    structured = params.structured_outputs
    if structured is None or structured.all_constraints_none():
        return
    by_tools = mode == "json" and structured.structural_tag is not None
    with in_vllms_words():
        check_constraint(structured, CONSTRAINT, "all" if by_tools else mode)


def check_logprobs(prompt: Any, params: SamplingParams, limits: LimitsConfig) -> None:
    """prompt: as vLLM's renderer leaves it. Raises VLLMValidationError."""
    ids = prompt.get("prompt_token_ids", ()) if isinstance(prompt, Mapping) else ()
    with in_vllms_words():
        check_prompt_logprobs("prompt_logprobs", len(ids), params.prompt_logprobs, limits, params.n)


def end_in_one_piece(params: SamplingParams, limits: LimitsConfig) -> None:
    """One that has no max_tokens ends where its log-probabilities do; the door has looked at the others."""
    if params.output_kind is RequestOutputKind.FINAL_ONLY and params.logprobs is not None:
        most = longest_in_one_piece(params.logprobs, limits, params.n)
        params.max_tokens = most if params.max_tokens is None else min(params.max_tokens, most)


def check_for_co_located(params: SamplingParams, method: str) -> None:
    """Raises VLLMValidationError for what vLLM's own drafting would ignore or die of."""
    with in_vllms_words():
        check_co_located_params(params, method, on_gpu=on_gpu())


def check_reasons(output: RequestOutput, params: SamplingParams, deadline: Deadline | None) -> None:
    """vLLM's classes know one way in which the engine gives a request up. Raises for those that are not its fault."""
    for completion in output.outputs:
        if completion.finish_reason == "error" and (asked := [name for name in LIMITS if getattr(params, name)]):
            raise VLLMValidationError(
                f"{', '.join(asked)} left no token to choose, or the grammar does not compile or could not go on",
                parameter=asked[0],
            )
        if completion.finish_reason == "abort" and deadline is not None and deadline.left_s() <= 0:
            raise GracefulHTTPError("aborted when its deadline passed", HTTPStatus.REQUEST_TIMEOUT)


def _with_time_left(params: SamplingParams) -> tuple[SamplingParams, Deadline | None]:
    """What goes to the engine's process, and the deadline by which this one judges."""
    ours = (params.extra_args or {}).get(EXTRA_ARGS_KEY, {})
    deadline: Deadline | None = ours.get("deadline")
    if deadline is None:
        return params, None
    kept = {name: value for name, value in ours.items() if name != "deadline"}
    params = copy.copy(params)  # vLLM gives all prompts of a request the same extra_args
    params.extra_args = {**(params.extra_args or {}), EXTRA_ARGS_KEY: {**kept, "timeout_s": deadline.left_s()}}
    return params, deadline


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
