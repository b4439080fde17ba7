"""What is refused of a constraint before anything looks into it, on both APIs, by its field's name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.exceptions import RetryableRequestError, VLLMValidationError
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import StructuredOutputsParams

from outrider.actors.grammars.bounds import MAX_CONSTRAINT_BYTES, MAX_NESTING, Allowance, Ending, check_size
from outrider.actors.grammars.refusals import REFUSALS
from outrider.actors.replica_calls import GenerationRequest, RequestError, TooManyRefused
from outrider.actors.round.origins import RoundLog
from outrider.actors.round.request import EXTRA_ARGS_KEY
from outrider.actors.serving.openai.checked_engine import check_constraint, check_reasons
from outrider.actors.vllm_seam.engine_requests import round_outputs, sampling_params

DEEP: dict[str, Any] = {}
for _ in range(MAX_NESTING + 1):
    DEEP = {"properties": {"a": DEEP}}

BOMBS = {
    "2 MB regex": {"regex": "(a|b)" * 400_000},
    "long grammar": {"grammar": 'root ::= "a"\n' * 10_000},
    "long choice": {"choice": ["a" * 100] * 1000},
    "wide schema": {"json": {"properties": {f"property {i}": {"type": "string"} for i in range(3000)}}},
    "wide schema as text": {"json": json.dumps({"enum": ["a" * 99] * 1000})},
    "deep schema": {"json": DEEP},
    "deep schema as text": {"json": json.dumps(DEEP)},
    "deep array": {"json": "[" * 20_000 + "]" * 20_000},
    "deep regex": {"regex": "(" * 200 + ")" * 200},
    "deep grammar": {"grammar": "root ::= " + "(" * 200 + '"a"' + ")" * 200},
    "deep tag": {"structural_tag": "[" * 5000},
}


def field_of(constraint: dict[str, Any]) -> str:
    return f"sampling.structured_outputs.{next(iter(constraint))}"


def asked(constraint: dict[str, Any]) -> GenerationRequest:
    return GenerationRequest(request_id="r", prompt_text="a", sampling={"structured_outputs": constraint})


@pytest.mark.parametrize("constraint", BOMBS.values(), ids=BOMBS)
def test_a_bomb_is_refused_by_size_or_depth_with_its_field(constraint: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as refused:
        sampling_params(asked(constraint), 1, 100)
    assert refused.value.field == field_of(constraint)
    with pytest.raises(VLLMValidationError) as told:
        check_constraint(SamplingParams(structured_outputs=StructuredOutputsParams(**constraint)), "all")
    assert told.value.parameter == f"structured_outputs.{next(iter(constraint))}"


def counted(doing: Callable[[], object], error: type[Exception]) -> dict[str, int]:
    """Which reasons are counted, while it is refused."""
    before = REFUSALS.counts()
    with pytest.raises(error):
        doing()
    return {reason: count - before[reason] for reason, count in REFUSALS.counts().items() if count != before[reason]}


@pytest.mark.parametrize(
    ("constraint", "mode", "reason"),
    [
        (BOMBS["2 MB regex"], "all", "size"),
        (BOMBS["wide schema"], "all", "size"),
        *((BOMBS[name], "all", "nesting") for name in BOMBS if name.startswith("deep")),
        ({"regex": "a"}, "json", "kind"),
        ({"json": "{}"}, "off", "kind"),
        ({"json": "{"}, "all", "invalid"),
        ({"choice": []}, "all", "invalid"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else value,
)
def test_each_refusal_is_counted_once_by_its_reason(constraint: dict[str, Any], mode: Any, reason: str) -> None:
    assert counted(lambda: sampling_params(asked(constraint), 1, 100, mode), RequestError) == {reason: 1}
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**constraint))
    assert counted(lambda: check_constraint(params, mode), VLLMValidationError) == {reason: 1}


@pytest.mark.parametrize("reason", ["compile_time", "compile_memory", "mask_time", "step", "server"])
def test_what_the_engine_ends_is_counted_where_its_client_is_told(reason: Any) -> None:
    stop_reason = Ending("is too much", reason).stop_reason()
    answer = CompletionOutput(0, "", [], None, None, finish_reason="error", stop_reason=stop_reason)
    output = RequestOutput("r", "a", [1], None, [answer], finished=True)
    request = asked({"regex": "a"})
    told = ConnectionError if reason == "server" else RequestError
    assert counted(lambda: round_outputs(output, request, {}, RoundLog(True)), told) == {reason: 1}
    over_http = RetryableRequestError if reason == "server" else VLLMValidationError
    assert counted(lambda: check_reasons(output, SamplingParams(), None), over_http) == {reason: 1}


def test_too_many_refused_are_counted_and_told_apart_from_a_bad_constraint() -> None:
    stop_reason = Ending("was not looked at", "budget", 3.0).stop_reason()
    answer = CompletionOutput(0, "", [], None, None, finish_reason="error", stop_reason=stop_reason)
    output = RequestOutput("r", "a", [1], None, [answer], finished=True)
    with pytest.raises(TooManyRefused) as told:
        round_outputs(output, asked({"regex": "a"}), {}, RoundLog(True))
    assert (told.value.field, told.value.retry_after_s) == ("sampling.structured_outputs.regex", 3.0)
    assert counted(lambda: round_outputs(output, asked({"regex": "a"}), {}, RoundLog(True)), TooManyRefused) == {
        "budget": 1
    }
    assert counted(lambda: check_reasons(output, SamplingParams(), None), TooManyRefused) == {"budget": 1}


def test_who_asks_goes_along_with_a_constraint() -> None:
    request = replace(asked({"regex": "a"}), asker=7)
    assert sampling_params(request, 1, 100).extra_args == {EXTRA_ARGS_KEY: {"asker": 7}}
    assert sampling_params(replace(request, sampling={}), 1, 100).extra_args is None


def test_answers_of_one_request_are_known_as_such_where_there_is_a_constraint() -> None:
    request = asked({"regex": "a"})
    several = replace(request, sampling={**request.sampling, "n": 2})
    extras = [sampling_params(several, 1, 100).extra_args or {} for _ in range(2)]
    assert len({extra[EXTRA_ARGS_KEY]["siblings"] for extra in extras}) == 2, "whatever the requests call themselves"
    assert sampling_params(replace(several, sampling={"n": 2}), 1, 100).extra_args is None


@pytest.mark.parametrize(
    "constraint",
    [
        {"json": json.dumps({"properties": {"a": {"pattern": "[(" * 100}}})},
        {"json": {"type": "object"}},
        {"regex": "a" * MAX_CONSTRAINT_BYTES},
        {"regex": "(a)" * 5000},
        {"choice": ["a", "b"]},
        {"json_object": True},
        {"grammar": 'root ::= "' + "(" * 20 + '"'},
    ],
    ids=str,
)
def test_what_is_within_bounds_goes_on_to_the_compiler(constraint: dict[str, Any]) -> None:
    structured = sampling_params(asked(constraint), 1, 100).structured_outputs
    assert structured is not None
    assert getattr(structured, next(iter(constraint))) == next(iter(constraint.values()))


@pytest.mark.parametrize("mode", ["off", "json", "all"])
@pytest.mark.parametrize(
    "constraint",
    [
        {"json": "{}"},
        {"json_object": True},
        {"choice": ["a"]},
        {"regex": "a"},
        {"grammar": 'root ::= "a"'},
        {"structural_tag": "{}"},
    ],
    ids=lambda constraint: next(iter(constraint)),
)
def test_the_configuration_says_which_constraints_are_served(mode: Any, constraint: dict[str, Any]) -> None:
    kind = next(iter(constraint))
    if mode == "all" or (mode == "json" and kind in ("json", "json_object", "choice")):
        assert sampling_params(asked(constraint), 1, 100, mode).structured_outputs is not None
        return
    with pytest.raises(RequestError, match=r"serving\.structured_output") as refused:
        sampling_params(asked(constraint), 1, 100, mode)
    assert refused.value.field == field_of(constraint)


def test_a_size_is_counted_in_bytes_and_counting_ends_early() -> None:
    class Endless(str):
        def encode(self, *_: Any, **__: Any) -> bytes:
            raise AssertionError("looked at")

    check_size("f", "regex", "ü" * (MAX_CONSTRAINT_BYTES // 2))
    with pytest.raises(RequestError):
        check_size("f", "regex", "ü" * (MAX_CONSTRAINT_BYTES // 2 + 1))
    with pytest.raises(RequestError):
        check_size("f", "choice", [Endless("ü"), "a" * (MAX_CONSTRAINT_BYTES + 1)])


def test_an_allowance_lasts_for_ever_at_its_refill_and_not_above() -> None:
    within = Allowance(0.1, 0.002)
    assert all(within.spend(0.006, masks=4) for _ in range(10_000))
    above = Allowance(0.1, 0.002)
    assert next(step for step in range(1000) if not above.spend(0.02)) < 10
    assert not Allowance(0.1, 0.002).spend(0.2)


def test_an_ending_travels_as_a_stop_reason_and_nothing_else_is_taken_for_one() -> None:
    for ending, is_clients in ((Ending("is too large", "compile_memory"), True), (Ending("is lost", "server"), False)):
        assert Ending.of(ending.stop_reason()) == ending
        assert ending.is_clients == is_clients
    assert [Ending.of(other) for other in (None, 7, "stop", "")] == [None] * 4
