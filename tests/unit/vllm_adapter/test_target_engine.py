"""Runs the target's engine over a script in place of AsyncLLM: rounds, failures, ids in use, and its report."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.exceptions import VLLMClientError
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.engine.output_processor import OutputProcessor

from outrider.actors.replica_calls import GenerationRequest, RequestError, RequestIdInUse, RoundOutput, SamplingFailed
from outrider.actors.serving.autoscaling import Report
from outrider.actors.vllm_adapter.engine_requests import sampling_params
from outrider.actors.vllm_adapter.target_engine import TargetEngine
from outrider.actors.vllm_adapter.work_meter import USUAL_ANSWER_TOKENS
from tests.unit.vllm_adapter.engine_outputs import MODEL, VOCAB_SIZE, delta, output, request


class ScriptedLLM:
    """Stands for AsyncLLM: yields outputs and raises errors as they come."""

    def __init__(self, *script: RequestOutput | Exception) -> None:
        self._script = script
        self.closed = False
        self.options: dict[str, Any] = {}

    async def generate(self, *_: Any, **options: Any) -> AsyncIterator[RequestOutput]:
        self.options = options
        try:
            for step in self._script:
                if isinstance(step, Exception):
                    raise step
                yield step
        finally:
            self.closed = True


class Front:
    """Stands for AsyncLLM's input processor."""

    def __init__(self) -> None:
        self.speculative_config: Any = object()


@pytest.fixture
def make_engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a TargetEngine over a script."""

    def make(llm: Any, **fields: Any) -> TargetEngine:
        llm.input_processor, llm.renderer = Front(), None
        llm.output_processor = OutputProcessor(None, log_stats=False)
        llm.model_config = SimpleNamespace(model="m", max_model_len=10, get_vocab_size=lambda: VOCAB_SIZE)
        monkeypatch.setattr(
            "outrider.actors.vllm_adapter.target_engine.AsyncLLM.from_vllm_config", lambda *_, **__: llm
        )
        config = SimpleNamespace(
            speculative_config=SimpleNamespace(method="custom_class"),
            scheduler_config=SimpleNamespace(max_num_seqs=36, max_num_active_seqs=4),
        )
        return TargetEngine(config, **fields)  # type: ignore[arg-type]

    return make


@pytest.fixture
def answers(make_engine: Any) -> Any:
    def answer(llm: ScriptedLLM, asked: GenerationRequest, *adapters: str) -> list[RoundOutput]:
        engine = make_engine(llm)
        engine.adapters |= {name: LoRARequest(name, 1 + i, f"/{name}") for i, name in enumerate(adapters)}

        async def collect() -> list[RoundOutput]:
            return [round_ async for round_ in engine.generate(asked)]

        return asyncio.run(collect())

    return answer


def wrapped(cause: Exception) -> EngineGenerateError:
    """Return what vLLM raises where it is neither a validation error nor the end of the engine."""
    error = EngineGenerateError()
    error.__cause__ = cause
    return error


def test_vllm_does_not_refuse_parameters_that_our_sampler_applies_under_speculation(make_engine: Any) -> None:
    params = sampling_params(request(sampling={"min_p": 0.5, "logit_bias": {5: 1.0}}), 2, 10)
    with pytest.raises(VLLMClientError, match="speculative"):
        params.verify(MODEL, Front().speculative_config, None, None)
    make_engine(llm := ScriptedLLM())
    params.verify(MODEL, llm.input_processor.speculative_config, None, None)


def test_the_engine_yields_a_round_per_answer_until_all_are_finished(answers: Any) -> None:
    llm = ScriptedLLM(
        output(delta(3, index=0), delta(4, index=1)),
        output(delta(5, index=0, finish_reason="stop")),
        output(delta(6, index=1, finish_reason="length"), finished=True),
    )
    rounds = answers(llm, request(sampling={"n": 2}))
    assert [(round_.index, round_.finish_reason) for round_ in rounds] == [
        (0, None), (1, None), (0, "stop"), (1, "length"),
    ]  # fmt: skip
    assert llm.closed
    assert llm.options == {"reasoning_ended": True, "lora_request": None}, "a constraint holds from the first token"


def test_a_request_s_adapter_goes_with_it(answers: Any) -> None:
    llm = ScriptedLLM(output(delta(5, index=0, finish_reason="stop"), finished=True))
    answers(llm, request(adapter="two"), "one", "two")
    assert (llm.options["lora_request"].lora_name, llm.options["lora_request"].lora_int_id) == ("two", 2)
    with pytest.raises(RequestError, match=r"adapter: is not known here; send one of \['one', 'two'\]"):
        answers(llm, request(adapter="three"), "one", "two")


def test_a_failed_answer_fails_the_request_and_closes_vllms_stream(answers: Any) -> None:
    llm = ScriptedLLM(output(delta(3, index=0)), output(delta(index=1, finish_reason="error")), output(delta(4)))
    with pytest.raises(SamplingFailed):
        answers(llm, request(sampling={"n": 2}))
    assert llm.closed, "the other answers would go on for nobody"


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ([VLLMClientError("no")], RequestError),
        ([wrapped(ValueError("no"))], RequestError),
        ([wrapped(KeyError("no"))], RuntimeError),
        ([output(delta(3)), wrapped(ValueError("no"))], RuntimeError),
        ([EngineDeadError()], ConnectionError),
    ],
)
def test_errors_of_vllm_are_the_clients_only_where_they_are(
    answers: Any, script: list[Any], expected: type[Exception]
) -> None:
    with pytest.raises(expected):
        answers(ScriptedLLM(*script), request())


def test_an_id_is_taken_while_its_request_runs_and_free_afterwards(make_engine: Any) -> None:
    engine = make_engine(ScriptedLLM(output(delta(3)), output(delta(4, finish_reason="stop"), finished=True)))

    async def ask_twice() -> None:
        first = engine.generate(request())
        await anext(first)
        with pytest.raises(RequestIdInUse, match="r-1"):
            await anext(engine.generate(request()))
        await anext(engine.generate(request(caller=7)))  # which is another one
        await first.aclose()
        assert (await anext(engine.generate(request()))).token_ids == (3,)

    asyncio.run(ask_twice())


def test_a_report_counts_the_tokens_of_requests_that_wait(make_engine: Any) -> None:
    states = {
        "runs": SimpleNamespace(is_prefilling=False, prompt_len=1000, max_tokens_param=1000),
        "has a seat": SimpleNamespace(is_prefilling=True, prompt_len=100, max_tokens_param=20),
        "waits": SimpleNamespace(is_prefilling=True, prompt_len=200, max_tokens_param=None),
    }
    engine = make_engine(SimpleNamespace())
    engine.llm.output_processor.request_states.update(states)
    stats = SimpleNamespace(num_running_reqs=2, num_waiting_reqs=1, kv_cache_usage=0.0)
    recorder = engine._load
    recorder.record(stats, None)
    report = engine.report()
    assert report["waiting_tokens"] == (100 + 20 + 200 + USUAL_ANSWER_TOKENS) / 2
    assert Report(**report) == Report(2, 1, 4, report["waiting_tokens"], 512, 0, 0, 0)
    stats.num_waiting_reqs = 0
    recorder.record(stats, None)
    assert engine.report()["waiting_tokens"] == 0
