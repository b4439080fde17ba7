"""Spans: one a request at the ingress, one in the target, one a round, in one trace; and none while tracing is off."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from outrider.actors.observability import tracing
from outrider.actors.observability.http import TraceRequests
from outrider.actors.observability.round_tracer import RoundTracer
from outrider.actors.round.request import EXTRA_ARGS_KEY
from outrider.actors.vllm_seam.engine_requests import traced_generate
from outrider.cluster.config import ConfigError, ServingConfig
from outrider.cluster.link.messages import DraftOrigin
from tests.otlp_collector import collecting
from tests.unit.round.scripted_link import Engine, arrival, asked, drafting, params

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
CALLER = {"traceparent": f"00-{TRACE_ID}-b7ad6b7169203331-01"}
UNSAMPLED = {"traceparent": f"00-{TRACE_ID}-b7ad6b7169203331-00"}


@pytest.fixture
def spans(monkeypatch):
    """Finished spans, of every component."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("test")
    monkeypatch.setattr(tracing, "process_tracer", lambda component: tracer)
    monkeypatch.setattr("outrider.actors.observability.http.process_tracer", lambda component: tracer)
    return SimpleNamespace(tracer=tracer, finished=exporter.get_finished_spans)


def context(metadata=()):
    return SimpleNamespace(invocation_metadata=lambda: list(metadata), peer=lambda: "ipv4:1")


class FakeLLM:
    """Two outputs, of three tokens together."""

    def generate(self, prompt, params, request_id, **options):
        self.params, self.options = params, options

        async def outputs():
            for tokens, finished in ((1, False), (2, True)):
                completion = SimpleNamespace(token_ids=[7] * tokens, finish_reason="stop" if finished else None)
                yield SimpleNamespace(
                    outputs=[completion], finished=finished, prompt_token_ids=[1, 2], num_cached_tokens=0
                )

        return outputs()


async def test_a_request_s_spans_are_one_trace_that_the_caller_began(spans):
    llm, params = FakeLLM(), SimpleNamespace(extra_args={EXTRA_ARGS_KEY: {"verification": "coupled"}})
    with tracing.rpc_span("Generate", context(CALLER.items()), "r1") as span:
        outputs = traced_generate(llm, "p", params, "r1", span.headers)
        assert [len(output.outputs[0].token_ids) async for output in outputs] == [1, 2]
    ours = params.extra_args[EXTRA_ARGS_KEY]
    assert ours["verification"] == "coupled"
    rounds = RoundTracer(spans.tracer)
    rounds.step_starts()
    rounds.committed(rounds.track(ours["trace_headers"]), 0, 1, 1)
    round_, target, ingress = sorted(spans.finished(), key=lambda span: span.name != "outrider.round")
    if target.kind is SpanKind.SERVER:
        target, ingress = ingress, target
    assert {f"{span.context.trace_id:032x}" for span in spans.finished()} == {TRACE_ID}
    assert f"{ingress.parent.span_id:016x}" == "b7ad6b7169203331"
    assert target.parent.span_id == ingress.context.span_id
    assert round_.parent.span_id == target.context.span_id
    assert llm.options["trace_headers"] == ours["trace_headers"]
    assert ingress.attributes["outrider.request_id"] == target.attributes["outrider.request_id"] == "r1"
    assert target.attributes["outrider.completion_tokens"] == 3
    assert target.attributes["outrider.finish_reason"] == "stop"


async def test_a_trace_that_is_not_sampled_is_passed_on_and_costs_no_rounds(spans):
    llm, params = FakeLLM(), SimpleNamespace(extra_args=None)
    async for _ in traced_generate(llm, "p", params, "r1", UNSAMPLED):
        pass
    assert params.extra_args is None
    assert llm.options["trace_headers"]["traceparent"].startswith(f"00-{TRACE_ID}-")
    assert llm.options["trace_headers"]["traceparent"].endswith("-00")
    assert spans.finished() == ()


def test_control_calls_are_not_traced(spans):
    with tracing.rpc_span("GetServerStatus", context(), None) as span:
        assert span.headers == {}
    assert spans.finished() == ()


def test_headers_that_are_none_begin_a_trace(spans):
    with tracing.ingress_span("x", {"traceparent": "rubbish"}):
        pass
    (span,) = spans.finished()
    assert span.parent is None


def test_errors_and_cancellations_end_the_span_and_say_so(spans):
    with pytest.raises(RuntimeError), tracing.ingress_span("failed", {}):
        raise RuntimeError("INTERNAL: broken")
    with pytest.raises(GeneratorExit), tracing.ingress_span("left", {}):
        raise GeneratorExit
    failed, left = spans.finished()
    assert (failed.status.status_code, failed.status.description) == (StatusCode.ERROR, "INTERNAL: broken")
    assert left.attributes["outrider.cancelled"]
    assert left.status.status_code is StatusCode.UNSET


async def test_http_requests_hand_their_span_on_in_the_headers(spans):
    seen = {}

    async def app(scope, receive, send):
        seen.update({name.decode(): value.decode() for name, value in scope["headers"]})
        await send({"type": "http.response.start", "status": 200, "headers": []})
        # A call made inside the ingress has no headers and belongs to this request.
        with tracing.rpc_span("GenerateStream", context(), "r1"):
            pass

    async def send(message): ...

    headers = [(name.encode(), value.encode()) for name, value in {"host": "h", **CALLER}.items()]
    await TraceRequests(app)({"type": "http", "method": "POST", "path": "/v1/x", "headers": headers}, None, send)
    inner, outer = spans.finished()
    assert seen["host"] == "h"
    assert seen["traceparent"] == f"00-{TRACE_ID}-{outer.context.span_id:016x}-01"
    assert inner.parent.span_id == outer.context.span_id
    assert outer.attributes["outrider.http_status"] == 200
    await TraceRequests(app)({"type": "http", "method": "GET", "path": "/metrics", "headers": []}, None, send)
    assert [span.name for span in spans.finished()].count("POST /v1/x") == 1


def test_a_round_s_span_says_what_the_round_did(spans):
    now = iter((2_000_000_000, 2_060_000_000))
    rounds = RoundTracer(spans.tracer, lambda: next(now))
    traced = rounds.track(CALLER)
    traced.origin = DraftOrigin.SIDE_BRANCH
    rounds.waited(0.010)
    rounds.step_starts()
    rounds.committed(traced, 4, 3, epoch=2)
    (span,) = spans.finished()
    assert dict(span.attributes) == {
        "outrider.round": 0,
        "outrider.k": 4,
        "outrider.accepted": 2,
        "outrider.committed": 3,
        "outrider.wait_ms": 10.0,
        "outrider.origin": "side_branch",
        "outrider.hit": True,
        "outrider.epoch": 2,
    }
    assert (span.start_time, span.end_time) == (1_990_000_000, 2_060_000_000)


def test_a_traced_request_s_rounds_are_reported_until_it_is_over_preempted_or_not(spans):
    def answer(message):
        return [replace(each, origin=DraftOrigin.SIDE_BRANCH) for each in drafting([1, 2, 3])(message)]

    engine = Engine(answer, tracer=RoundTracer(spans.tracer))
    traced = params(temperature=0.0, extra_args=asked(trace_headers=CALLER))
    engine.begin(arrival(of=traced), "not traced")
    engine.step({"a": [5], "not traced": [5]})
    engine.step({"a": [1, 2, 9]}, {"a": [1, 2, 3]})
    engine.begin(preempted=["a"])
    engine.begin(resumed=["a"])
    engine.step({"a": [5]})
    engine.tell(finished=["a"])
    engine.step({"a": [5], "not traced": [5]})
    rounds = [dict(span.attributes) for span in spans.finished()]
    assert [round_["outrider.round"] for round_ in rounds] == [0, 1, 2]
    assert [round_["outrider.k"] for round_ in rounds] == [0, 3, 0]
    assert [round_["outrider.committed"] for round_ in rounds] == [1, 3, 1]
    assert [round_["outrider.origin"] for round_ in rounds] == ["none", "side_branch", "none"]
    assert {round_["outrider.epoch"] for round_ in rounds} == {1}


def test_without_a_tracer_a_traced_request_has_no_trace():
    engine = Engine()
    engine.begin(arrival(of=params(extra_args=asked(trace_headers=CALLER))))
    engine.step({"a": [5]})
    assert engine["a"].trace is None


async def test_off_means_untouched(monkeypatch):
    monkeypatch.delenv(tracing.ENDPOINT, raising=False)
    tracing.process_tracer.cache_clear()
    llm, params = FakeLLM(), SimpleNamespace(extra_args=None)
    async for _ in traced_generate(llm, "p", params, "r1", {}):
        pass
    assert llm.options == {}
    assert params.extra_args is None
    with tracing.rpc_span("Generate", context(CALLER.items()), "r1") as span:
        assert span is tracing.OFF


def test_the_configuration_becomes_opentelemetry_s_own_variables(monkeypatch):
    for name in (tracing.PROTOCOL, "OTEL_SERVICE_NAME"):
        monkeypatch.delenv(name, raising=False)
    assert tracing.environment(ServingConfig()) == {}
    assert tracing.environment(ServingConfig(otlp_traces_endpoint="http://c:4317", trace_sample_ratio=0.25)) == {
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4317",
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc",
        "OTEL_SERVICE_NAME": "outrider",
        "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
        "OTEL_TRACES_SAMPLER_ARG": "0.25",
    }


def test_a_missing_package_is_an_error_that_names_the_extra(monkeypatch):
    monkeypatch.setattr(tracing, "_PACKAGES", ("opentelemetry.sdk.trace", "no_such_exporter.of_spans"))
    with pytest.raises(ConfigError, match=r"serving\.otlp_traces_endpoint: .*outrider\[otel\]"):
        tracing.environment(ServingConfig(otlp_traces_endpoint="http://c:4317"))


@pytest.mark.parametrize(
    ("key", "value"), [("otlp_traces_endpoint", "c:4317"), ("trace_sample_ratio", 2), ("log_format", "xml")]
)
def test_the_configuration_refuses_what_cannot_be(key, value):
    with pytest.raises(ValueError, match=key):
        ServingConfig(**{key: value})


def test_spans_reach_a_collector_with_their_component(monkeypatch):
    with collecting(0) as collector:
        for name, value in tracing.environment(
            ServingConfig(otlp_traces_endpoint=f"http://127.0.0.1:{collector.port}", trace_sample_ratio=0)
        ).items():
            monkeypatch.setenv(name, value)
        tracing.process_tracer.cache_clear()
        try:
            with tracing.ingress_span("sampled by its caller", CALLER):
                pass
            with tracing.ingress_span("not sampled here", {}):
                pass
            tracer = tracing.process_tracer("ingress")
            tracer.span_processor.force_flush()
        finally:
            tracing.process_tracer.cache_clear()
    ((component, span),) = collector.spans
    assert (component, span.name, span.trace_id.hex()) == ("ingress", "sampled by its caller", TRACE_ID)
