"""What is refused of a constraint before vLLM reads it, by its field's name, and that JSON schemas are enforced."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from outrider.actors.replica_calls import GenerationRequest, RequestError
from outrider.actors.request_constraints import MAX_CONSTRAINT_BYTES, MAX_NESTING
from outrider.actors.vllm_adapter.engine_requests import sampling_params

DEEP: dict[str, Any] = {}
for _ in range(MAX_NESTING + 1):
    DEEP = {"properties": {"a": DEEP}}

BOMBS = {
    "2 MB regex": {"regex": "(a|b)" * 400_000},
    "long grammar": {"grammar": 'root ::= "a"\n' * 10_000},
    "long choice": {"choice": ["a" * 100] * 1000},
    "wide schema": {"json": {"properties": {f"property {i}": {"type": "string"} for i in range(3000)}}},
    "wide object": {"json": {"properties": {f"p{i}": {} for i in range(1001)}}},
    "many branches": {"json": {"anyOf": [{"properties": {f"p{i}": {}}} for i in range(1001)]}},
    "more bytes than characters": {"regex": "ü" * (MAX_CONSTRAINT_BYTES // 2 + 1)},
    "deep schema": {"json": DEEP},
    "deep schema as text": {"json": json.dumps(DEEP)},
    "deep array": {"json": "[" * 20_000 + "]" * 20_000},
    "deep regex": {"regex": "(" * 200 + ")" * 200},
    "deep grammar": {"grammar": "root ::= " + "(" * 200 + '"a"' + ")" * 200},
    "deep tag": {"structural_tag": "[" * 5000 + "]" * 5000},
    "many items": {"json": {"items": {"multipleOf": 3}, "minItems": 10**8}},
    "no JSON": {"json": "{"},
    "no schema": {"json": "[]"},
    "not enforced": {"json": {"anyOf": [{"properties": {"a": {"not": {"type": "string"}}}}]}},
    "for a third backend": {"json": {"type": "object", "properties": {"b": {}}, "patternProperties": {"^a": {}}}},
}


def asked(constraint: dict[str, Any]) -> GenerationRequest:
    return GenerationRequest(request_id="r", prompt_text="a", sampling={"structured_outputs": constraint})


@pytest.mark.parametrize("constraint", BOMBS.values(), ids=BOMBS)
def test_a_bomb_is_refused_with_its_field(constraint: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as refused:
        sampling_params(asked(constraint), 1, 100)
    assert refused.value.field == f"sampling.structured_outputs.{next(iter(constraint))}"


@pytest.mark.parametrize(
    "constraint",
    [
        {"json": json.dumps({"properties": {"a": {"pattern": "[(]" * 100}}})},
        {"json": {"properties": {"not": {"enum": [{"if": 1}]}}}},
        {"json": {"properties": {f"p{i}": {} for i in range(1000)}}},
        {"json": {"enum": list(range(1001))}},
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


UNENFORCED = ("not", "if", "dependentRequired", "dependentSchemas", "contains", "uniqueItems", "propertyNames")


@pytest.mark.parametrize("keyword", UNENFORCED)
def test_a_keyword_that_is_not_enforced_is_named(keyword: str) -> None:
    value: Any = keyword == "uniqueItems" or {"a": ["b"]} if "Required" in keyword else {"enum": [1]}
    with pytest.raises(RequestError, match=f"^sampling.structured_outputs.json: .*{keyword}"):
        sampling_params(asked({"json": {keyword: value}}), 1, 100)


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "object", "required": ["name"]}, '{"name": 1}', "{}"),
        ({"$defs": {"x": {"type": "string"}}, "$ref": "#/$defs/x", "minLength": 3}, '"abc"', '"a"'),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}], "minLength": 3}, "1", '"a"'),
        ({"enum": ["a", "abcd"], "minLength": 3}, '"abcd"', '"a"'),
        ({"type": "integer", "enum": ["a", 1]}, "1", '"a"'),
        ({"pattern": "^a+$", "maxLength": 2}, '"aa"', '"aaaa"'),
        ({"multipleOf": 3, "minimum": 4}, "6", "5"),
        ({"type": "string", "pattern": "b"}, '"abc"', '"ac"'),
        ({"type": "array", "maxItems": 1}, "[1]", "[1, 2]"),
        ({"type": "array", "prefixItems": [{"type": "string"}]}, '["a", 1]', "[1]"),
    ],
    ids=str,
)
def test_a_schema_is_enforced_by_the_backend_that_compiles_it(schema: dict[str, Any], right: str, wrong: str) -> None:
    """Which is guidance: test_structured_outputs.py."""
    assert sampling_params(asked({"json": schema}), 1, 100).structured_outputs is not None
    tokenizer = LLTokenizer("byte")
    for text, follows in ((right, True), (wrong, False)):
        matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(schema))
        assert (matcher.consume_tokens(tokenizer.tokenize_str(text)) and matcher.is_accepting()) is follows


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
