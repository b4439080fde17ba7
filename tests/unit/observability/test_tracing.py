"""Spans: one a request at the ingress, one in the target, one a round, in one trace; and none while tracing is off.

With a collector and real processes: tests/integration/test_traces_and_logs.py.
"""

from types import SimpleNamespace

import httpx
import pytest
from fastapi import FastAPI, Request
from msgspec import structs
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

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


def test_errors_and_cancellations_end_the_span_and_say_so(spans):
    with pytest.raises(RuntimeError), tracing.rpc_span("failed", context(), "r1"):
        raise RuntimeError("INTERNAL: broken")
    with pytest.raises(GeneratorExit), tracing.rpc_span("left", context([("traceparent", "rubbish")]), "r1"):
        raise GeneratorExit
    with tracing.rpc_span("GetServerStatus", context(), None) as headers:
        assert headers == {}, "a control call has no span"
    failed, left = spans.finished()
    assert (failed.status.status_code, failed.status.description) == (StatusCode.ERROR, "INTERNAL: broken")
    assert left.attributes["outrider.cancelled"]
    assert left.status.status_code is StatusCode.UNSET
    assert left.parent is None, "headers that are none begin a trace"


async def test_opentelemetry_traces_http_and_what_is_called_is_a_child(spans):
    app, seen = FastAPI(), {}

    @app.post("/v1/{what}")
    async def answer(request: Request, what: str):
        seen.update({name.decode(): value.decode() for name, value in tracing.forwarded(request.scope["headers"])})
        with tracing.rpc_span("GenerateStream", context(), "r1"):  # of the page: no headers of its own
            pass

    @app.get("/metrics")
    async def scrape(): ...

    tracing.instrument(app)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as client:
        await client.post("/v1/x", headers=CALLER)
        await client.get("/metrics")
    inner, outer = spans.finished()
    assert (outer.name, outer.kind) == ("POST /v1/{what}", SpanKind.SERVER)
    assert f"{outer.parent.span_id:016x}" == "b7ad6b7169203331"
    assert inner.parent.span_id == outer.context.span_id
    assert seen["host"] == "here"
    assert seen["traceparent"] == f"00-{TRACE_ID}-{outer.context.span_id:016x}-01"
    assert tracing.forwarded([(b"a", b"b")]) == [(b"a", b"b")], "outside of a request"


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


def test_a_round_begins_when_the_wait_for_its_proposals_does(spans):
    now = iter((2_000_000_000, 2_060_000_000))
    rounds = RoundTracer(spans.tracer, lambda: next(now))
    rounds.waited(0.010)
    rounds.step_starts()
    rounds.committed(rounds.track(CALLER), 4, 3, epoch=2)
    (span,) = spans.finished()
    assert span.attributes["outrider.wait_ms"] == 10.0
    assert (span.start_time, span.end_time) == (1_990_000_000, 2_060_000_000)


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
