"""What is refused of a constraint before vLLM reads it, on both APIs, by its field's name."""

from __future__ import annotations

import json
from typing import Any

import pytest
import xgrammar
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.structured_output.backend_guidance import validate_guidance_grammar

from outrider.actors.replica_calls import GenerationRequest, RequestError
from outrider.actors.request_constraints import MAX_CONSTRAINT_BYTES, MAX_NESTING, UNENFORCED
from outrider.actors.serving.openai.checked_engine import check_structured
from outrider.actors.vllm_seam.engine_requests import sampling_params

DEEP: dict[str, Any] = {}
for _ in range(MAX_NESTING + 1):
    DEEP = {"properties": {"a": DEEP}}

BOMBS = {
    "2 MB regex": {"regex": "(a|b)" * 400_000},
    "long grammar": {"grammar": 'root ::= "a"\n' * 10_000},
    "long choice": {"choice": ["a" * 100] * 1000},
    "wide schema": {"json": {"properties": {f"property {i}": {"type": "string"} for i in range(3000)}}},
    "more bytes than characters": {"regex": "ü" * (MAX_CONSTRAINT_BYTES // 2 + 1)},
    "deep schema": {"json": DEEP},
    "deep schema as text": {"json": json.dumps(DEEP)},
    "deep array": {"json": "[" * 20_000 + "]" * 20_000},
    "deep regex": {"regex": "(" * 200 + ")" * 200},
    "deep grammar": {"grammar": "root ::= " + "(" * 200 + '"a"' + ")" * 200},
    "deep tag": {"structural_tag": "[" * 5000 + "]" * 5000},
    "many items": {"json": {"items": {"multipleOf": 3}, "minItems": 10**8}},
    "no JSON": {"json": "{"},
    "not enforced": {"json": {"anyOf": [{"properties": {"a": {"not": {"type": "string"}}}}]}},
    "for a third backend": {"json": {"type": "object", "properties": {"b": {}}, "patternProperties": {"^a": {}}}},
}


def asked(constraint: dict[str, Any]) -> GenerationRequest:
    return GenerationRequest(request_id="r", prompt_text="a", sampling={"structured_outputs": constraint})


@pytest.mark.parametrize("constraint", BOMBS.values(), ids=BOMBS)
def test_a_bomb_is_refused_with_its_field(constraint: dict[str, Any]) -> None:
    field = f"structured_outputs.{next(iter(constraint))}"
    with pytest.raises(RequestError) as refused:
        sampling_params(asked(constraint), 1, 100)
    assert refused.value.field == f"sampling.{field}"
    with pytest.raises(VLLMValidationError) as told:
        check_structured(SamplingParams(structured_outputs=StructuredOutputsParams(**constraint)), "all")
    assert told.value.parameter == field


@pytest.mark.parametrize(
    "constraint",
    [
        {"json": json.dumps({"properties": {"a": {"pattern": "[(" * 100}}})},
        {"json": {"properties": {"not": {"enum": [{"if": 1}]}}}},
        {"regex": "a" * MAX_CONSTRAINT_BYTES},
        {"regex": "(a)" * 5000},
        {"choice": ["a", "b"]},
        {"json_object": True},
        {"grammar": 'root ::= "' + "(" * 20 + '"'},
    ],
    ids=str,
)
def test_what_is_within_bounds_goes_on_to_vllm(constraint: dict[str, Any]) -> None:
    structured = sampling_params(asked(constraint), 1, 100).structured_outputs
    assert structured is not None
    assert getattr(structured, next(iter(constraint))) == next(iter(constraint.values()))


VALUES = {"dependentRequired": {"a": ["b"]}, "dependencies": {"a": ["b"]}, "dependentSchemas": {"a": {"required": []}}}


@pytest.mark.parametrize("keyword", sorted(UNENFORCED))
def test_no_backend_enforces_what_is_refused_by_its_keyword(keyword: str) -> None:
    value: Any = VALUES.get(keyword, 1 if keyword[:3] in ("min", "max") else "#a" if "$" in keyword else {"enum": [1]})
    value = keyword == "uniqueItems" or value
    schema = {keyword: value}
    with_it, without = (str(xgrammar.Grammar.from_json_schema(each)) for each in (schema, {"unknown": value}))
    assert with_it == without, "xgrammar enforces it"
    with pytest.raises(VLLMValidationError, match="Unimplemented keys"):
        validate_guidance_grammar(SamplingParams(structured_outputs=StructuredOutputsParams(json=schema)))


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
    assert refused.value.field == f"sampling.structured_outputs.{kind}"
