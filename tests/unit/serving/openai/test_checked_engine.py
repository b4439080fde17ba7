"""What stands between vLLM's serving classes and the engine."""

from __future__ import annotations

from contextlib import aclosing, contextmanager
from types import SimpleNamespace

import pytest
from vllm import SamplingParams
from vllm.exceptions import GenerationError, GracefulHTTPError, RetryableRequestError, VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from outrider.actors.openai_calls import TokensUsed
from outrider.actors.replica_calls import Deadline
from outrider.actors.request_checks import unknown_adapter
from outrider.actors.round.request import EXTRA_ARGS_KEY
from outrider.actors.serving.openai.checked_engine import TALLY, CheckedEngine, Tally


class Llm:
    """Gives outputs with these finish reasons; exceptions are raised."""

    name = "llm"

    def __init__(self, *script):
        self._script, self.closed, self.params, self.options, self.ids = script, False, [], [], []

    async def generate(self, prompt, params, request_id, **options):
        self.params.append(params)
        self.options.append(options)
        self.ids.append(request_id)
        try:
            for step in self._script:
                if isinstance(step, Exception):
                    raise step
                completion = SimpleNamespace(finish_reason=step, stop_reason=None, token_ids=[7])
                yield SimpleNamespace(outputs=[completion], prompt_token_ids=[1, 2])
        finally:
            self.closed = True


def generate(llm, **params):
    return CheckedEngine(llm).generate("prompt", SamplingParams(**params), "r", priority=0)


async def collect(outputs):
    return [output.outputs[0].finish_reason async for output in outputs]


def wrapped(cause):
    error = EngineGenerateError()
    error.__cause__ = cause
    return error


async def test_an_engine_tells_callers_requests_of_the_same_id_apart():
    llm = Llm("stop")
    for caller in ({}, {"caller": 10}, {"caller": 11}):
        await collect(generate(llm, extra_args={EXTRA_ARGS_KEY: caller}))
    assert llm.ids == ["r", "a r", "b r"]


async def test_tokens_are_added_up_for_whoever_asks():
    tally = Tally()
    TALLY.set(tally)
    await collect(generate(Llm(None, "stop")))
    await collect(generate(Llm("stop")))
    assert tally.uncounted == 7
    assert tally.take() == TokensUsed(prompt=4, completion=3)
    assert tally.uncounted == 0


async def test_a_constraint_holds_from_the_first_token_but_in_a_chat_that_says_otherwise():
    llm = Llm("stop")
    await collect(generate(llm))
    for ended in (None, False):
        engine = CheckedEngine(llm)
        await collect(engine.generate("prompt", SamplingParams(), "r", reasoning_ended=ended))
    assert [options["reasoning_ended"] for options in llm.options] == [True, None, False]


async def test_outputs_and_attributes_pass_through():
    assert CheckedEngine(Llm()).name == "llm"
    assert await collect(generate(Llm(None, "stop"))) == [None, "stop"]


@pytest.mark.parametrize("ours", [{"verification": "greedy"}, {"verification": "block"}])
def test_what_would_end_rank_0_is_refused_at_once(ours):
    with pytest.raises(VLLMValidationError):
        generate(Llm(), structured_outputs=StructuredOutputsParams(regex="a"), extra_args={"outrider": ours})


async def test_a_dead_engine_may_be_retried():
    with pytest.raises(RetryableRequestError):
        await collect(generate(Llm(EngineDeadError())))


async def test_what_vllm_wraps_is_unwrapped_before_any_output():
    with pytest.raises(VLLMValidationError, match="no such grammar"):
        await collect(generate(Llm(wrapped(ValueError("no such grammar\nline two")))))


@pytest.mark.parametrize("script", [(wrapped(RuntimeError("x")),), (None, wrapped(ValueError("x")))])
async def test_other_failures_stay_the_servers(script):
    with pytest.raises(EngineGenerateError):
        await collect(generate(Llm(*script)))


async def test_constraints_that_leave_no_token_are_the_clients():
    with pytest.raises(VLLMValidationError) as caught:
        await collect(generate(Llm("error"), allowed_token_ids=[1], min_tokens=1))
    assert caught.value.parameter == "allowed_token_ids"
    assert await collect(generate(Llm("error"))) == ["error"]  # vLLM's classes raise GenerationError for it
    assert issubclass(GenerationError, Exception)


async def test_an_abort_at_the_deadline_is_a_timeout():
    late = {"outrider": {"deadline": Deadline(1000.0, clock=lambda: 1000.0)}}
    with pytest.raises(GracefulHTTPError) as caught:
        await collect(generate(Llm("abort"), extra_args=late))
    assert caught.value.http_status == 408
    early = {"outrider": {"deadline": Deadline(1060.0, clock=lambda: 1000.0)}}
    assert await collect(generate(Llm("abort"), extra_args=early)) == ["abort"]


async def test_the_engine_is_told_what_is_left_and_each_prompt_is():
    """vLLM gives all prompts of a request the same extra_args; what the engine gets crosses into its process."""
    now, llm = 1000.0, Llm("stop")
    given = {"outrider": {"verification": "coupled", "deadline": Deadline(1060.0, clock=lambda: now)}, "other": 1}
    await collect(generate(llm, extra_args=given))
    now += 20.0
    await collect(generate(llm, extra_args=given))
    assert [params.extra_args for params in llm.params] == [
        {"outrider": {"verification": "coupled", "timeout_s": left_s}, "other": 1} for left_s in (60.0, 40.0)
    ]


async def test_closing_closes_the_engines_generator():
    llm = Llm(None, None)
    outputs = generate(llm)
    await anext(outputs)
    assert not llm.closed
    await outputs.aclose()
    assert llm.closed


class Adapters:
    """Of one that may have been unloaded."""

    def __init__(self, there):
        self._there, self.used = there, 0

    @contextmanager
    def using(self, request):
        if request is not None and not self._there:
            raise unknown_adapter("adapter", "mine", ["other"])
        self.used += 1
        try:
            yield
        finally:
            self.used -= 1


async def test_an_adapter_is_held_until_the_answer_ends():
    adapters = Adapters(there=True)
    engine = CheckedEngine(Llm(None, "stop"), adapters=adapters)
    async with aclosing(engine.generate("prompt", SamplingParams(), "r", lora_request="mine")) as outputs:
        await anext(outputs)
        assert adapters.used == 1
    assert adapters.used == 0


async def test_one_that_has_just_been_unloaded_is_the_request_s_fault():
    engine = CheckedEngine(Llm("stop"), adapters=Adapters(there=False))
    with pytest.raises(VLLMValidationError, match="'mine' is not known here; send one of 'other'") as refused:
        await anext(engine.generate("prompt", SamplingParams(), "r", lora_request="mine"))
    assert refused.value.parameter == "model"
