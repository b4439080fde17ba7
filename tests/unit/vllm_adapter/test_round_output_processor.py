"""Origins through vLLM's own output processor: merged when nobody reads, cut at stop strings, per answer."""

from __future__ import annotations

from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

from outrider.actors.replica_calls import GenerationRequest
from outrider.actors.round.origins import RoundLog
from outrider.actors.vllm_adapter.engine_requests import round_outputs
from outrider.actors.vllm_adapter.target_engine import log_rounds
from tests.support.models.tiny_models import _byte_tokenizer

K = 4


@pytest.fixture
def log() -> RoundLog:
    log = RoundLog(speculating=True)
    log.watch("r")
    return log


@pytest.fixture
def processor(log: RoundLog) -> OutputProcessor:
    processor = OutputProcessor(_byte_tokenizer(), log_stats=False)
    log_rounds(processor, log)
    return processor


def engine_request(request_id: str = "r-0a", external: str = "r", **sampling: Any) -> EngineCoreRequest:
    params = SamplingParams(output_kind=RequestOutputKind.DELTA, **sampling)
    return EngineCoreRequest(request_id, [65], None, params, None, 0.0, None, None, None, external_req_id=external)


def add(processor: OutputProcessor, request: EngineCoreRequest, **more: Any) -> RequestOutputCollector:
    queue = more.pop("queue", None) or RequestOutputCollector(RequestOutputKind.DELTA, request.request_id)
    processor.add_request(request, None, queue=queue, **more)
    return queue


class Rounds:
    """The scheduler's side: rounds of one answer, with counts that grow."""

    def __init__(self, request_id: str = "r-0a") -> None:
        self._id, self._counts = request_id, RequestSpecDecodeMetrics.new(K)

    def __call__(self, text: str, drafted: int = 0, **fields: Any) -> EngineCoreOutput:
        if drafted:
            self._counts.observe(drafted, len(text) - 1)
        now = RequestSpecDecodeMetrics(K, list(self._counts.histogram), self._counts.num_draft_tokens)
        return EngineCoreOutput(self._id, list(text.encode()), spec_decode_metrics=now, **fields)


def read(queue: RequestOutputCollector, log: RoundLog, counts: dict[int, int] | None = None) -> list[Any]:
    output = queue.get_nowait()
    return round_outputs(output, GenerationRequest("r", prompt_text="A"), {} if counts is None else counts, log)


def test_rounds_that_vllm_merges_keep_their_origins(processor: OutputProcessor, log: RoundLog) -> None:
    queue, rounds = add(processor, engine_request()), Rounds()
    for output in (rounds("a"), rounds("bcd", drafted=4), rounds("ef", drafted=1)):
        processor.process_outputs([output])
    (told,) = read(queue, log)
    assert told.text == "abcdef"
    assert told.origins == ("plain", "accepted", "accepted", "recovered", "accepted", "bonus")
    assert told.num_rounds == 3


def test_what_a_stop_string_cuts_off_has_no_origin_and_the_rest_keeps_its_own(
    processor: OutputProcessor, log: RoundLog
) -> None:
    queue, rounds = add(processor, engine_request(stop=["cd"])), Rounds()
    processor.process_outputs([rounds("ab", drafted=3)])
    processor.process_outputs([rounds("cdef", drafted=3)])
    (told,) = read(queue, log)
    assert told.finish_reason == "stop"
    assert len(told.token_ids) == 4
    assert told.origins == ("accepted", "recovered", "accepted", "accepted")
    assert told.speculative_decoding is not None
    assert told.speculative_decoding.num_accepted_draft_tokens == 4, "counted when the engine accepted them"


def test_answers_of_one_request_are_told_apart(processor: OutputProcessor, log: RoundLog) -> None:
    parent = ParentRequest(engine_request("r-0a", n=2, seed=1))
    queue = RequestOutputCollector(RequestOutputKind.DELTA, "r-0a")
    for index in range(2):
        child = engine_request(f"{index}_r-0a", seed=index)
        processor.add_request(child, None, parent, index, queue)
    processor.process_outputs([Rounds("0_r-0a")("ab", drafted=2), Rounds("1_r-0a")("c", drafted=1)])
    told = {round_.index: round_.origins for round_ in read(queue, log)}
    assert told == {0: ("accepted", "recovered"), 1: ("recovered",)}


def test_other_requests_of_the_engine_are_not_logged(processor: OutputProcessor, log: RoundLog) -> None:
    """vLLM's own front ends ask the same engine, and take nothing out again."""
    queue = add(processor, engine_request("x-0a", "x"))
    processor.process_outputs([Rounds("x-0a")("ab", drafted=2), Rounds("gone")("ab", drafted=2)])
    assert queue.get_nowait() is not None
    assert not log.watches("x")


def test_a_request_that_is_aborted_has_its_counts_so_far(processor: OutputProcessor, log: RoundLog) -> None:
    queue, rounds = add(processor, engine_request()), Rounds()
    processor.process_outputs([rounds("abc", drafted=2)])
    processor.abort_requests(["r"], internal=False)
    (told,) = read(queue, log)
    assert (told.finish_reason, told.origins) == ("abort", ("accepted", "accepted", "bonus"))
    assert told.speculative_decoding is not None
    assert told.speculative_decoding.num_accepted_draft_tokens == 2
