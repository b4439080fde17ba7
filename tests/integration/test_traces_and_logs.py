"""Traces and logs of a served request: through every process, in one trace, with one id."""

import json
import time
import uuid
from pathlib import Path

import grpc
import pytest
import ray

from outrider.v1 import generation_pb2 as pb
from outrider.v1 import generation_pb2_grpc as rpc
from tests.support.cluster.serving import HANG_GUARD_S, TRACES_PORT, drafted, num_draft_tokens, wait_until
from tests.support.otlp_collector import attributes, collecting

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

PROMPT = "one two three one two three one two"
CALLER_SPAN = "b7ad6b7169203331"


@pytest.fixture(scope="module")
def collector():
    with collecting(TRACES_PORT) as collector:
        yield collector


def caller(trace_id, sampled=True):
    return {"traceparent": f"00-{trace_id}-{CALLER_SPAN}-{'01' if sampled else '00'}"}


def stream(deployment, headers, request_id):
    with grpc.insecure_channel(deployment.address) as channel:
        request = pb.GenerateStreamRequest(text=PROMPT, request_id=request_id)
        request.sampling.temperature, request.sampling.max_tokens = 0.0, 24
        call = rpc.GenerationServiceStub(channel).GenerateStream(
            request, metadata=tuple(headers.items()), timeout=HANG_GUARD_S
        )
        return list(call)


def whole(collector, trace_id, num_tokens):
    """The trace, once every round of it is there."""

    def found():
        trace = collector.of_trace(trace_id)
        rounds = [attributes(span) for _, span in trace if span.name == "outrider.round"]
        names = {span.name for _, span in trace}
        complete = sum(round_["outrider.committed"] for round_ in rounds) >= num_tokens
        return trace if complete and {"outrider.target", "llm_request"} <= names and len(names) >= 4 else None

    return wait_until(found, HANG_GUARD_S, "the whole trace", every_s=0.2)


def check(trace, ingress_name):
    """One tree: caller, ingress, target; below that vLLM's span and the rounds. Returns the rounds' attributes."""
    ((ingress_component, ingress),) = [(c, s) for c, s in trace if s.name == ingress_name]
    ((target_component, target),) = [(c, s) for c, s in trace if s.name == "outrider.target"]
    assert (ingress_component, target_component) == ("ingress", "target")
    assert ingress.parent_span_id.hex() == CALLER_SPAN
    assert target.parent_span_id == ingress.span_id
    below = [(c, s) for c, s in trace if s.parent_span_id == target.span_id]
    assert {s.name for _, s in below} == {"outrider.round", "llm_request"}
    rounds = [(c, s) for c, s in below if s.name == "outrider.round"]
    assert {component for component, _ in rounds} == {"verifier"}
    assert all(s.start_time_unix_nano < s.end_time_unix_nano for _, s in rounds)
    return sorted((attributes(span) for _, span in rounds), key=lambda round_: round_["outrider.round"])


def test_a_grpc_request_is_one_trace_with_a_span_a_round(ngram_pair, collector):
    trace_id = ""

    def ask():
        nonlocal trace_id
        trace_id = uuid.uuid4().hex
        return stream(ngram_pair, caller(trace_id), f"traced-{trace_id}")

    messages = drafted(ask, lambda messages: num_draft_tokens(messages[-1]))
    tokens = sum(len(message.token_ids) for message in messages)
    rounds = check(whole(collector, trace_id, tokens), "outrider.v1.GenerationService/GenerateStream")
    assert [round_["outrider.round"] for round_ in rounds] == list(range(len(rounds)))
    speculative = messages[-1].metrics.speculative_decoding
    with_drafts = [round_ for round_ in rounds if round_["outrider.k"]]
    assert len(with_drafts) == speculative.num_spec_steps
    assert sum(round_["outrider.k"] for round_ in rounds) == speculative.num_draft_tokens
    assert all(round_["outrider.accepted"] == round_["outrider.committed"] - 1 for round_ in rounds)
    assert all(round_["outrider.epoch"] == ngram_pair.status().link.epoch for round_ in rounds)
    assert any(round_["outrider.origin"] != "none" for round_ in with_drafts)


def test_what_the_caller_does_not_want_traced_is_not(ngram_pair, collector):
    """Requests without a caller's trace are not traced either: their share is 0 in this deployment."""
    unwanted, wanted = "33333333333333333333333333333333", "44444444444444444444444444444444"
    stream(ngram_pair, caller(unwanted, sampled=False), "unwanted")
    stream(ngram_pair, {}, "nobody-asked")
    messages = stream(ngram_pair, caller(wanted), "wanted")
    whole(collector, wanted, sum(len(message.token_ids) for message in messages))
    assert collector.of_trace(unwanted) == []
    assert "nobody-asked" not in {attributes(span).get("outrider.request_id") for _, span in collector.spans}


def json_lines(pattern):
    """Lines of the session's logs that are JSON objects, but for those that are being written."""
    logs = Path(ray._private.worker._global_node.get_session_dir_path()) / "logs"
    for path in logs.glob(pattern):
        for line in path.read_text(errors="replace").splitlines(keepends=True):
            if line.startswith("{") and line.endswith("\n"):
                yield json.loads(line)


def test_the_request_s_id_is_on_the_lines_of_ingress_and_target(ngram_pair):
    request_id = f"logged-{time.time_ns()}"
    stream(ngram_pair, {}, request_id)

    def components():
        lines = [line for line in json_lines("serve/replica_*.log") if line.get("outrider_request_id") == request_id]
        found = {line["deployment"].rpartition("_")[2] for line in lines}
        return found if found >= {"Ingress", "Target"} else None

    wait_until(components, HANG_GUARD_S, "a line of each", every_s=0.2)


def test_verifier_and_drafter_write_json_lines(ngram_pair):
    stream(ngram_pair, {}, "any")
    names = {line.get("name", "") for line in json_lines("worker-*.err")}
    assert "outrider.cluster.link.keeper" in names, "of the verifier"
    assert "outrider.actors.drafter.actor" in names
