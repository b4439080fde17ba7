"""`outrider bench`: the closed loop over gRPC against a small server, and what vLLM is given for the other side."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from outrider.cluster.config import parse_config
from outrider.cluster.engine_args import schema
from outrider.deploy.bench import load
from outrider.deploy.bench.load import Ask, ask_all
from outrider.deploy.bench.machine import BenchError
from outrider.deploy.bench.sides import engine_arguments, environment
from outrider.deploy.client.sync_client import OutriderClient
from outrider.v1 import generation_pb2 as pb
from outrider.v1 import generation_pb2_grpc as rpc


class Service(rpc.GenerationServiceServicer):  # type: ignore[misc]
    """Answers with two messages, and counts how many requests were under way at once."""

    def __init__(self) -> None:
        self.requests: list[pb.GenerateStreamRequest] = []
        self.most_at_once = 0
        self.hangs, self.cancelled = threading.Event(), threading.Event()
        self._now = 0
        self._lock = threading.Lock()

    def GenerateStream(self, request: pb.GenerateStreamRequest, context: Any) -> Iterator[pb.GenerateStreamResponse]:
        with self._lock:
            self.requests.append(request)
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
        try:
            if request.text == "bad":
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, "prompt: too long")
            if request.text == "hang":
                context.add_callback(self.cancelled.set)
                self.hangs.set()
                self.cancelled.wait(60)
            yield pb.GenerateStreamResponse(token_ids=[1])
            last = pb.GenerateStreamResponse(token_ids=[2, 3], finish_reason=pb.FINISH_REASON_LENGTH)
            if request.text == "aborted":
                last.finish_reason = pb.FINISH_REASON_ABORT
            counted = last.metrics.speculative_decoding
            counted.num_spec_steps, counted.num_draft_tokens, counted.num_accepted_draft_tokens = 1, 4, 1
            yield last
        finally:
            with self._lock:
                self._now -= 1


@pytest.fixture
def service() -> Iterator[tuple[Service, OutriderClient]]:
    service = Service()
    server = grpc.server(ThreadPoolExecutor(8))
    rpc.add_GenerationServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with OutriderClient(f"127.0.0.1:{port}") as client:
        yield service, client
    server.stop(0)


def asks(*texts: str) -> list[Ask]:
    return [Ask(index, text, 3, 0.5, 7 + index) for index, text in enumerate(texts)]


def test_every_prompt_is_asked_once_with_its_own_seed_and_no_more_than_allowed_at_once(
    service: tuple[Service, OutriderClient],
) -> None:
    server, client = service
    seconds, answers = ask_all(client, asks(*"abcdef"), 2, lambda done, tokens: None, verification="block")
    assert sorted(answer.index for answer in answers) == list(range(6))
    assert {(request.text, request.sampling.seed) for request in server.requests} == set(
        zip("abcdef", range(7, 13), strict=True)
    )
    assert server.requests[0].speculation.verification == pb.VERIFICATION_BLOCK
    assert server.most_at_once <= 2
    assert seconds > 0
    answer = answers[0]
    assert [tokens for _, tokens in answer.arrivals] == [1, 2]
    assert answer.token_ids == (1, 2, 3)
    assert (answer.drafted_rounds, answer.drafted, answer.accepted) == (1, 4, 1)
    assert 0 < answer.arrivals[0][0] <= answer.arrivals[1][0] <= answer.ended_s


@pytest.mark.parametrize(
    ("text", "message"),
    [("bad", "prompt 2 of the dataset: INVALID_ARGUMENT: prompt: too long"), ("aborted", "prompt 2 .* broke off")],
)
def test_a_request_that_fails_ends_the_run(text: str, message: str, service: tuple[Service, OutriderClient]) -> None:
    with pytest.raises(BenchError, match=message):
        ask_all(service[1], asks("a", text, "b"), 1, lambda done, tokens: None)
    assert "b" not in {request.text for request in service[0].requests}


def test_an_interrupt_cancels_what_is_under_way(
    service: tuple[Service, OutriderClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "POLL_S", 0.02)
    server, client = service

    def interrupt(done: int, tokens: int) -> None:
        assert server.hangs.wait(60)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ask_all(client, asks("hang", "a"), 1, interrupt)
    assert server.cancelled.wait(60)
    assert [request.text for request in server.requests] == ["hang"]


def test_the_other_side_gets_our_models_our_lengths_and_the_cache_of_both_our_engines() -> None:
    config = parse_config(
        {
            "target": {
                "model": "t",
                "max_model_len": 512,
                "kv_cache_memory_bytes": 300,
                "cores": [[0]],
                "engine_args": {"block_size": 64},
            },
            "drafter": {"method": "draft_model", "model": "d", "kv_cache_memory_bytes": 200, "revision": "main"},
        }
    )
    plain, speculating = engine_arguments(config, None), engine_arguments(config, 3, compile_models=True)
    assert (plain["model"], plain["max_model_len"], plain["kv_cache_memory_bytes"]) == ("t", 512, 300)
    assert plain.keys() - schema()["properties"].keys() == {"engine_args"}
    assert plain["engine_args"] == speculating["engine_args"] == {"block_size": 64}
    assert "speculative_config" not in plain
    assert speculating["kv_cache_memory_bytes"] == 500
    assert speculating["enforce_eager"] is False
    assert speculating["speculative_config"] == {
        "method": "draft_model",
        "model": "d",
        "num_speculative_tokens": 3,
        "revision": "main",
    }


def test_vllm_binds_its_threads_to_the_cores_it_is_given() -> None:
    settings = environment(((0, 1), (2, 3)))
    assert settings["VLLM_CPU_OMP_THREADS_BIND"] == "0,1|2,3"
    assert settings["OMP_NUM_THREADS"] == "4"
    assert "VLLM_CPU_OMP_THREADS_BIND" not in environment(None)
