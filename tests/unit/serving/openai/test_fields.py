"""The rules of request fields against the schemas they are about: nothing of vLLM's or OpenAI's is left out."""

import dataclasses
import types
import typing

import pytest
from openai.types import completion_create_params
from openai.types import responses as openai_responses
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params, response_format_text_json_schema_config_param
from openai.types.shared_params import Reasoning
from vllm.entrypoints.generate.base import protocol as generate_protocol
from vllm.entrypoints.openai.chat_completion import protocol as chat_protocol
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.serve.tokenize.protocol import (
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
)
from vllm.renderers import chat_utils
from vllm.sampling_params import RepetitionDetectionParams, StructuredOutputsParams

from outrider.actors.serving.openai.door import BY_ENDPOINT
from outrider.actors.serving.openai.fields import CHAT, COMPLETIONS, Label, Refused, Works
from outrider.actors.serving.openai.fields_reference import PATH, render
from outrider.actors.serving.openai.responses_fields import INPUT_ITEMS, PICTURE_PARTS, RESPONSES, TEXT_PARTS, TOOLS

CHAT_MODEL = chat_protocol.ChatCompletionRequest
MODELS = {
    "chat": (CHAT_MODEL,),
    "completions": (CompletionRequest,),
    "responses": (ResponsesRequest,),
    "tokenize": (TokenizeCompletionRequest, TokenizeChatRequest),
    "detokenize": (DetokenizeRequest,),
}
OURS = {"speculation"}


def keys(*kinds):
    """Field names as they are sent, of pydantic models, dataclasses and typed dictionaries."""
    found = set()
    for kind in kinds:
        if dataclasses.is_dataclass(kind):
            found |= {field.name for field in dataclasses.fields(kind) if not field.name.startswith("_")}
        elif hasattr(kind, "model_fields"):
            found |= {field.alias or name for name, field in kind.model_fields.items()}
        else:
            found |= set(typing.get_type_hints(kind))
    return found


def union(alias):
    for member in typing.get_args(alias):
        if isinstance(member, types.UnionType) or typing.get_origin(member) is typing.Union:
            yield from union(member)
        else:
            yield member


@pytest.mark.parametrize("endpoint", MODELS)
def test_every_field_of_vllms_has_a_rule(endpoint):
    assert keys(*MODELS[endpoint]) - set(BY_ENDPOINT[endpoint]) == set()


@pytest.mark.parametrize("endpoint", MODELS)
def test_what_works_is_a_field_of_vllms(endpoint):
    """Else vLLM would drop it."""
    works = {name for name, rule in BY_ENDPOINT[endpoint].items() if isinstance(rule, Works)}
    assert works - keys(*MODELS[endpoint]) - OURS == set()


@pytest.mark.parametrize(
    ("rules", "parameters"),
    [
        (CHAT, chat_create_params.CompletionCreateParamsBase),
        (COMPLETIONS, completion_create_params.CompletionCreateParamsBase),
        (RESPONSES, response_create_params.ResponseCreateParamsBase),
    ],
)
def test_every_field_of_openais_has_a_rule(rules, parameters):
    assert set(parameters.__annotations__) - set(rules) == set()


def inner(*path):
    rules = CHAT
    for name in path:
        rules = rules[name].inner
    return rules


NESTED = {
    ("stream_options",): (generate_protocol.StreamOptions,),
    ("response_format",): tuple(union(generate_protocol.AnyResponseFormat)),
    ("response_format", "json_schema"): (generate_protocol.JsonSchemaResponseFormat,),
    ("structured_outputs",): (StructuredOutputsParams,),
    ("repetition_detection",): (RepetitionDetectionParams,),
    ("tools",): (chat_protocol.ChatCompletionToolsParam,),
    ("tools", "function"): (generate_protocol.FunctionDefinition,),
    ("tool_choice",): (chat_protocol.ChatCompletionNamedToolChoiceParam,),
    ("tool_choice", "function"): (chat_protocol.ChatCompletionNamedFunction,),
    ("messages",): (
        *typing.get_args(chat_utils.OpenAIChatCompletionMessageParam),
        chat_utils.CustomChatCompletionMessageParam,
    ),
}


@pytest.mark.parametrize("path", NESTED, ids=".".join)
def test_every_key_inside_a_field_has_a_rule(path):
    assert keys(*NESTED[path]) - set(inner(*path)) == set()


def test_every_kind_of_content_part_has_rules():
    parts = [part for part in union(chat_utils.ChatCompletionContentPartParam) if part is not str]
    wanted = set().union(*(keys(part) for part in parts))
    assert wanted - set(inner("messages", "content")) == set()


OF_RESPONSES = {
    "text": (RESPONSES["text"].inner, openai_responses.ResponseTextConfigParam),
    "text.format": (
        RESPONSES["text"].inner["format"].inner,
        response_format_text_json_schema_config_param.ResponseFormatTextJSONSchemaConfigParam,
    ),
    "reasoning": (RESPONSES["reasoning"].inner, Reasoning),
    "input message": (INPUT_ITEMS["message"], openai_responses.EasyInputMessageParam),
    "an answer's message": (INPUT_ITEMS["message"], openai_responses.ResponseOutputMessageParam),
    "function_call": (INPUT_ITEMS["function_call"], openai_responses.ResponseFunctionToolCallParam),
    "function_call_output": (
        INPUT_ITEMS["function_call_output"],
        openai_responses.response_input_param.FunctionCallOutput,
    ),
    "custom_tool_call": (INPUT_ITEMS["custom_tool_call"], openai_responses.ResponseCustomToolCallParam),
    "custom_tool_call_output": (
        INPUT_ITEMS["custom_tool_call_output"],
        openai_responses.ResponseCustomToolCallOutputParam,
    ),
    "reasoning item": (INPUT_ITEMS["reasoning"], openai_responses.ResponseReasoningItemParam),
    "input_text": (TEXT_PARTS["input_text"], openai_responses.ResponseInputTextParam),
    "input_image": (PICTURE_PARTS["input_image"], openai_responses.ResponseInputImageParam),
    "output_text": (TEXT_PARTS["output_text"], openai_responses.ResponseOutputTextParam),
    "refusal": (TEXT_PARTS["refusal"], openai_responses.ResponseOutputRefusalParam),
    "function": (TOOLS["function"], openai_responses.FunctionToolParam),
    "custom": (TOOLS["custom"], openai_responses.CustomToolParam),
}


@pytest.mark.parametrize("name", OF_RESPONSES)
def test_every_key_inside_a_response_has_a_rule(name):
    rules, parameters = OF_RESPONSES[name]
    assert keys(parameters) - set(rules) == set()


def test_neutral_values_are_vllms_defaults():
    """A client that sends vLLM's own default asks for nothing; but for ``store``, by which it asks for what there is
    not: vLLM takes and ignores it."""
    for endpoint, models in MODELS.items():
        for model in models:
            for name, field in model.model_fields.items():
                rule = BY_ENDPOINT[endpoint][name]
                if isinstance(rule, Refused) and not field.is_required():
                    default = field.get_default(call_default_factory=True)
                    assert default is None or default in rule.neutral or name == "store", name


def test_rules_have_reasons():
    for rules in (*BY_ENDPOINT.values(), *INPUT_ITEMS.values(), *TEXT_PARTS.values(), *TOOLS.values()):
        for name, rule in rules.items():
            assert not isinstance(rule, Refused) or rule.reason, name
            assert not isinstance(rule, Label) or rule.note, name


def test_page_is_fresh():
    page = PATH.read_text()
    assert page == render(page), "run: python -m outrider.actors.serving.openai.fields_reference"
    assert all(f"| `{name}` |" in page for rules in BY_ENDPOINT.values() for name in rules)
