"""Converts requests, outputs and refusals, with vLLM's own checks and without an engine."""

from __future__ import annotations

import math
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import StructuredOutputsConfig
from vllm.exceptions import VLLMClientError
from vllm.logprobs import Logprob
from vllm.outputs import RequestOutput

from outrider.actors.replica_calls import (
    Deadline,
    GenerationRequest,
    RequestError,
    RoundOutput,
    SamplingFailed,
    TokenLogprob,
    TokenLogprobs,
)
from outrider.actors.request_ids import scoped_id, unscoped
from outrider.actors.round.origins import RoundLog
from outrider.actors.round.request import EXTRA_ARGS_KEY
from outrider.actors.vllm_adapter.engine_requests import is_of_request, refusal, sampling_params
from outrider.actors.vllm_adapter.engine_requests import round_outputs as outputs_of_rounds
from tests.unit.vllm_adapter.engine_outputs import MODEL, VOCAB_SIZE, delta, output, request


def settings(**fields: Any) -> Any:
    return (sampling_params(request(**fields), 2, 10).extra_args or {}).get(EXTRA_ARGS_KEY)


def round_outputs(output: RequestOutput, asked: GenerationRequest, num_tokens: dict[int, int]) -> list[RoundOutput]:
    return outputs_of_rounds(output, asked, num_tokens, RoundLog(speculating=True))


def test_extra_args_hold_what_the_request_set_and_nothing_else() -> None:
    assert settings() is None
    assert settings(num_speculative_tokens=2) == {"num_speculative_tokens": 2}
    assert settings(speculation=False) == {"num_speculative_tokens": 0}
    assert settings(verification="block") == {"verification": "block"}
    assert settings(speculation=False, verification="coupled") == {
        "num_speculative_tokens": 0,
        "verification": "coupled",
    }
    assert settings(deadline=Deadline(1012.5, clock=lambda: 1000.0)) == {"timeout_s": 12.5}


def test_every_parameter_reaches_vllm_by_its_name() -> None:
    chosen: dict[str, Any] = {
        "n": 3, "logprobs": 2, "prompt_logprobs": 0, "allowed_token_ids": [5], "bad_words": ["no"], "min_p": 0.1,
        "logit_bias": {5: 1.0}, "seed": 7,
    }  # fmt: skip
    params = sampling_params(request(sampling={**chosen, "structured_outputs": {"choice": ["a"]}}), 2, 10)
    assert {name: getattr(params, name) for name in chosen} == chosen
    assert params.structured_outputs is not None
    assert params.structured_outputs.choice == ["a"]
    assert params.max_tokens == 8


@pytest.mark.parametrize(
    ("sampling", "max_tokens"), [({}, 8), ({"max_tokens": 3}, 3), ({"max_tokens": 9}, 8), ({"min_tokens": 8}, 8)]
)
def test_an_answer_has_what_the_prompt_leaves(sampling: dict[str, Any], max_tokens: int) -> None:
    assert sampling_params(request(sampling=sampling), 2, 10).max_tokens == max_tokens


@pytest.mark.parametrize(
    ("field", "value", "more", "words"),
    [
        ("temperature", math.nan, {}, "must be a finite number"),
        ("max_tokens", 11, {}, "cannot be greater than max_model_len=10"),
        ("min_tokens", 9, {}, "less than or equal to max_tokens=8"),
        ("min_tokens", 9, {"max_tokens": 9}, "less than or equal to max_tokens=8"),
        ("stop", [""], {}, "cannot contain an empty string"),
        ("n", 2, {"temperature": 0.0}, "must be 1 when using greedy sampling"),
        ("n", 20_000, {}, "must be at most"),
    ],
)
def test_vllms_own_words_stand_behind_our_fields_name(field: str, value: Any, more: Any, words: str) -> None:
    with pytest.raises(RequestError, match=f"^sampling.{field}: .*{words}") as caught:
        sampling_params(request(sampling={field: value, **more}), 2, 10)
    assert caught.value.field == f"sampling.{field}"


@pytest.mark.parametrize("backend", ["xgrammar", "guidance", "auto"])
@pytest.mark.parametrize(
    ("field", "sampling"),
    [
        ("sampling.allowed_token_ids", {"allowed_token_ids": [1, VOCAB_SIZE]}),
        ("sampling.structured_outputs.choice", {"structured_outputs": {"choice": []}}),
        ("sampling.structured_outputs.json_object", {"structured_outputs": {"json_object": False}}),
        ("sampling.logprobs", {"logprobs": 21}),
        ("sampling.structured_outputs.regex", {"structured_outputs": {"regex": "[a"}}),
        ("sampling.structured_outputs.grammar", {"structured_outputs": {"grammar": "nonsense"}}),
    ],
)
def test_what_vllm_refuses_is_named(
    field: str, sampling: dict[str, Any], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "vllm.v1.structured_output.backend_guidance.GuidanceBackend.is_tokenizer_supported", lambda _: True
    )
    asked = request(sampling=sampling)
    params = sampling_params(asked, 2, 10)
    with pytest.raises(VLLMClientError) as caught:
        params.verify(MODEL, None, StructuredOutputsConfig(backend=backend), SimpleNamespace())
    error = refusal(caught.value, asked)
    assert error.field == field
    assert "\n" not in str(error)
    assert "/project/" not in str(error), "where in the compiler's source is of no use to a client"
    assert len(str(error)) < 500


@pytest.mark.parametrize(
    ("field", "sampling"),
    [
        ("sampling.allowed_token_ids", {"allowed_token_ids": [1, -1], "logit_bias": {1: 1.0}}),
        ("sampling.logit_bias", {"logit_bias": {2**31: 1.0}}),
        *(("sampling.logit_bias", {"logit_bias": {1: bias}}) for bias in (math.nan, math.inf, 1e300)),
        ("sampling.logit_bias", {"allowed_token_ids": [1], "logit_bias": {1: math.nan}}),
    ],
)
def test_what_the_drafter_could_not_be_told_is_named(field: str, sampling: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        sampling_params(request(sampling=sampling), 2, 10)
    assert caught.value.field == field


def test_answers_are_told_apart_and_counted_each() -> None:
    asked, counts = request(sampling={"n": 2}), {}
    first = round_outputs(output(delta(3, 4, index=1), delta(5, index=0)), asked, counts)
    assert [(round_.index, round_.token_ids, round_.finish_reason) for round_ in first] == [
        (1, (3, 4), None),
        (0, (5,), None),
    ]
    (last,) = round_outputs(
        output(delta(6, index=1, finish_reason="stop", stop_reason=6), finished=False), asked, counts
    )
    assert (last.index, last.finish_reason, last.stop_reason) == (1, "stop", "6")
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.cached_tokens) == (2, 3, 0)
    assert counts == {0: 1, 1: 3}


def test_logprobs_are_the_tokens_own_and_the_likeliest() -> None:
    asked = request(sampling={"logprobs": 2})
    unlikely = {7: Logprob(-9.0, rank=50), 3: Logprob(-0.1, rank=1), 4: Logprob(-2.0, rank=2)}
    likeliest = {3: Logprob(-0.1, rank=1), 4: Logprob(-2.0, rank=2)}
    (round_,) = round_outputs(output(delta(7, 3, logprobs=[unlikely, likeliest])), asked, {})
    top = (TokenLogprob(3, -0.1), TokenLogprob(4, -2.0))
    assert round_.logprobs == (TokenLogprobs(7, -9.0, 50, top), TokenLogprobs(3, -0.1, 1, top))


def test_prompt_logprobs_come_once_a_request() -> None:
    asked, counts = request(sampling={"n": 2, "prompt_logprobs": 0}), {}
    given = [None, {2: Logprob(-1.5, rank=4)}]
    first = round_outputs(output(delta(3, index=0), delta(4, index=1), prompt_logprobs=given), asked, counts)
    assert [round_.prompt_logprobs for round_ in first] == [(None, TokenLogprobs(2, -1.5, 4)), ()]
    (later,) = round_outputs(output(delta(5, index=1), prompt_logprobs=given), asked, counts)
    assert later.prompt_logprobs == ()


def test_an_engine_error_names_the_request_and_the_reason() -> None:
    with pytest.raises(SamplingFailed) as caught:
        round_outputs(output(delta(finish_reason="error"), finished=True), request(), {0: 1})
    error = pickle.loads(pickle.dumps(caught.value))
    assert str(error) == "request r-1: the model's logits for the next token were not finite"


@pytest.mark.parametrize(("before", "where"), [({}, "begin an answer with"), ({0: 7}, "go on with after 7 tokens")])
@pytest.mark.parametrize(
    "limit", [{"structured_outputs": {"json": "{}"}}, {"allowed_token_ids": [1]}, {"repetition_penalty": 1e-300}]
)
def test_limits_that_leave_no_token_are_the_request_s_own(
    limit: dict[str, Any], before: dict[int, int], where: str
) -> None:
    with pytest.raises(RequestError, match=rf"sampling\.{next(iter(limit))}.*leaves no token to {where}"):
        round_outputs(output(delta(finish_reason="error"), finished=True), request(sampling=limit), before)


@pytest.mark.parametrize(
    ("verification", "structured"), [("rejection", {"regex": "a+"}), ("block", {"regex": "a+"}), ("greedy", None)]
)
def test_a_verification_that_the_verifier_would_raise_for_is_refused_before_it(
    verification: str, structured: Any
) -> None:
    """Callers of the replica's handle do not come through the ingress and its checks."""
    sampling = {} if structured is None else {"structured_outputs": structured}
    with pytest.raises(RequestError) as refused:
        sampling_params(request(sampling=sampling, verification=verification), 2, 10)
    assert refused.value.field == "speculation.verification"


@pytest.mark.parametrize(
    ("engine_id", "request_id", "same"),
    [
        ("r-1", "r-1", True),
        ("chatcmpl-r-1", "r-1", True),
        ("cmpl-r-1-0", "r-1", True),
        ("cmpl-r-1-12", "cmpl-r-1", True),
        ("resp_r-1_0", "r-1", True),
        ("resp_r-1_0", "resp_r-1", True),
        ("r-1_0", "r-1", False),
        ("r-1-0", "r-1", False),
        ("r-10", "r-1", False),
        ("cmpl-r-1-x", "r-1", False),
        ("chatcmpl-r-1", "cmpl-r-1", False),
    ],
)
def test_which_requests_of_the_engine_a_callers_id_means(engine_id: str, request_id: str, same: bool) -> None:
    assert is_of_request(engine_id, request_id) is same
    assert is_of_request(engine_id, request_id, 0) is same
    of_a_key = scoped_id(0xA1, engine_id)
    assert is_of_request(of_a_key, request_id) is is_of_request(of_a_key, request_id, 0xA1) is same
    assert not is_of_request(of_a_key, request_id, 0xA2)
    assert not is_of_request(of_a_key, request_id, 0)
    assert not is_of_request(engine_id, request_id, 0xA1)
    assert unscoped(of_a_key) == engine_id
    assert unscoped(f"0_{of_a_key}") == f"0_{engine_id}", "as vLLM calls the first of several answers"
