"""Spans: one a request at the ingress, one in the target, one a round, in one trace; and none while tracing is off.

With a collector and real processes: tests/integration/test_traces_and_logs.py.
"""

from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from msgspec import structs
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from outrider.actors.observability import environment, tracing
from outrider.actors.observability.environment import process_environment
from outrider.actors.observability.tracing import RoundTracer
from outrider.actors.round.request import EXTRA_ARGS_KEY
from outrider.actors.vllm_adapter.engine_requests import traced_generate
from outrider.cluster.config import ConfigError, ServingConfig
from outrider.cluster.link.messages import DraftOrigin
from tests.unit.round.scripted_link import Engine, arrival, asked, drafting, params

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
CALLER = {"traceparent": f"00-{TRACE_ID}-b7ad6b7169203331-01"}


@pytest.fixture
def spans(monkeypatch):
    """Finished spans, of every component."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(tracing, "process_provider", lambda component: provider)
    return SimpleNamespace(tracer=provider.get_tracer("test"), finished=exporter.get_finished_spans)


def context(metadata=()):
    return SimpleNamespace(invocation_metadata=lambda: list(metadata), peer=lambda: "ipv4:1")


class FakeLLM:
    """Two outputs, of three tokens together."""

    def generate(self, prompt, params, request_id, **options):
        self.options = options

        async def outputs():
            for tokens, finished in ((1, False), (2, True)):
                completion = SimpleNamespace(token_ids=[7] * tokens, finish_reason="stop" if finished else None)
                yield SimpleNamespace(
                    outputs=[completion], finished=finished, prompt_token_ids=[1, 2], num_cached_tokens=0
                )

        return outputs()


async def test_a_request_s_spans_are_one_trace_that_the_caller_began(spans):
    llm, params = FakeLLM(), SimpleNamespace(extra_args={EXTRA_ARGS_KEY: {"verification": "coupled"}})
    with tracing.rpc_span("Generate", context(CALLER.items()), "r1") as headers:
        outputs = traced_generate(llm, "p", params, "r1", headers)
        assert [len(output.outputs[0].token_ids) async for output in outputs] == [1, 2]
    ours = params.extra_args[EXTRA_ARGS_KEY]
    assert ours["verification"] == "coupled"
    assert llm.options["trace_headers"] == ours["trace_headers"]
    rounds = RoundTracer(spans.tracer)
    rounds.step_starts()
    rounds.committed(rounds.track(ours["trace_headers"]), 0, 1, 1)
    target, ingress, round_ = spans.finished()
    assert {f"{span.context.trace_id:032x}" for span in spans.finished()} == {TRACE_ID}
    assert f"{ingress.parent.span_id:016x}" == "b7ad6b7169203331"
    assert target.parent.span_id == ingress.context.span_id
    assert round_.parent.span_id == target.context.span_id
    assert ingress.attributes["outrider.request_id"] == target.attributes["outrider.request_id"] == "r1"
    assert target.attributes["outrider.completion_tokens"] == 3
    assert target.attributes["outrider.finish_reason"] == "stop"


def test_a_traced_request_s_rounds_are_reported_until_it_is_over_preempted_or_not(spans):
    def answer(message):
        return [structs.replace(each, origin=DraftOrigin.SIDE_BRANCH) for each in drafting([1, 2, 3])(message)]

    engine = Engine(answer, tracer=RoundTracer(spans.tracer))
    engine.begin(arrival(of=params(temperature=0.0, extra_args=asked(trace_headers=CALLER))), "not traced")
    engine.step({"a": [5], "not traced": [5]})
    engine.step({"a": [1, 2, 9]}, {"a": [1, 2, 3]})
    engine.begin(preempted=["a"])
    engine.begin(resumed=["a"])
    engine.step({"a": [5]})
    engine.tell(finished=["a"])
    engine.step({"a": [5], "not traced": [5]})
    names = ("round", "k", "accepted", "committed", "origin", "hit", "epoch")
    assert [tuple(span.attributes[f"outrider.{name}"] for name in names) for span in spans.finished()] == [
        (0, 0, 0, 1, "none", False, 1),
        (1, 3, 2, 3, "side_branch", True, 1),
        (2, 0, 0, 1, "none", False, 1),
    ]


async def test_off_means_untouched(monkeypatch):
    monkeypatch.delenv(tracing.ENDPOINT, raising=False)
    tracing.process_provider.cache_clear()
    llm, options, app = FakeLLM(), SimpleNamespace(extra_args=None), FastAPI()
    async for _ in traced_generate(llm, "p", options, "r1", {}):
        pass
    assert llm.options == {}
    assert options.extra_args is None
    with tracing.rpc_span("Generate", context(CALLER.items()), "r1") as headers:
        assert headers == {}
    tracing.instrument(app)
    assert not hasattr(app, "_is_instrumented_by_opentelemetry")
    engine = Engine()
    engine.begin(arrival(of=params(extra_args=asked(trace_headers=CALLER))))
    engine.step({"a": [5]})
    assert engine["a"].trace is None


def test_the_configuration_becomes_opentelemetry_s_own_variables(monkeypatch):
    for name in (tracing.PROTOCOL, "OTEL_SERVICE_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.25")
    traced = ServingConfig(otlp_traces_endpoint="http://c:4317")
    assert process_environment(ServingConfig()) == {}
    assert process_environment(traced) == {
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4317",
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc",
        "OTEL_SERVICE_NAME": "outrider",
        "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
        "OTEL_TRACES_SAMPLER_ARG": "0.25",
    }
    monkeypatch.setattr(environment, "_PACKAGES", ("sdk.trace", "no_such_exporter.of_spans"))
    with pytest.raises(ConfigError, match=r"serving\.otlp_traces_endpoint: .*outrider\[otel\]"):
        process_environment(traced)
