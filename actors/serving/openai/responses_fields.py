"""Every request field of ``/v1/responses``, OpenAI's and vLLM's: whether it works here.

Of some objects the fields depend on their ``type``: the items of ``input``, their parts, and tools. What is not named
here is refused by its type.
"""

from __future__ import annotations

from collections.abc import Mapping

from outrider.actors.serving.openai.fields import (
    CACHE_HINT,
    CHAT,
    DETAIL,
    JSON_SCHEMA,
    TEXT_ONLY,
    Label,
    Refused,
    Rule,
    Rules,
    Works,
    plain,
)

_STATELESS = "responses are not stored here; send the whole conversation in input"
_NO_BUILT_IN_TOOLS = "there are no built-in tools"
_OPENAIS_OWN = "OpenAI's own"
_SUMMARY = "reasoning comes as it is, not summarised"

_TEXT_FORMAT: dict[str, Rule] = {"type": Works("text, json_object, json_schema"), **JSON_SCHEMA}

_TEXT: dict[str, Rule] = {
    "format": Works(shape="object", inner=_TEXT_FORMAT),
    "verbosity": Refused("OpenAI's models only", ("medium",)),
}

_REASONING: dict[str, Rule] = {
    "effort": Works("as the model's chat template has it; none: no thinking, where the template knows that"),
    "summary": Refused(_SUMMARY, ("auto",)),
    "generate_summary": Refused(_SUMMARY, ("auto",)),
    "context": Refused("the chat template decides what it keeps of earlier reasoning", ("auto",)),
    "mode": Refused(_OPENAIS_OWN, ("standard",)),
}

RESPONSES: Rules = {
    "input": Works("a text, or 4096 items at most: see below"),
    "instructions": Works("a system message in front"),
    "max_output_tokens": Works("reasoning included"),
    "text": Works(shape="object", inner=_TEXT),
    "reasoning": Works(shape="object", inner=_REASONING),
    "tools": Works("function and custom; where the model's way of calling them is known (openai.tool_call_parser)"),
    "tool_choice": Works("none, auto, required, or one tool by its type and name"),
    "include": Works(
        "message.output_text.logprobs; reasoning.encrypted_content has no effect: reasoning comes in clear"
    ),
    "top_logprobs": Works("0 to 20, with message.output_text.logprobs in include"),
    "metadata": Works("comes back with the answer"),
    "user": Works("comes back with the answer"),
    "enable_response_messages": Works("prompt and answer as text and token ids, with the answer"),
    **{
        name: CHAT[name]
        for name in (
            "model", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids",
            "include_stop_str_in_output", "ignore_eos", "frequency_penalty", "presence_penalty", "repetition_penalty",
            "logit_bias", "stream", "structured_outputs", "skip_special_tokens", "parallel_tool_calls",
            "include_reasoning", "chat_template_kwargs", "cache_salt", "request_id", "speculation", "safety_identifier",
            "prompt_cache_key", "media_io_kwargs", "mm_processor_kwargs", "moderation", "prompt_cache_options",
            "prompt_cache_retention", "service_tier", "watermarking", "priority", "session_id", "mm_payload",
            "return_mm_kwargs", "kv_transfer_params", "ec_transfer_params", "vllm_xargs",
        )
    },
    "stream_options": Refused("events are not padded, and usage is always there", ({}, {"include_obfuscation": False})),
    "store": Refused("responses are not stored here, and answers say so (store: false)", (False,)),
    "previous_response_id": Refused(_STATELESS),
    "conversation": Refused(_STATELESS),
    "background": Refused("a response that is read later would have to be stored", (False,)),
    "background_options": Refused("a response that is read later would have to be stored"),
    "previous_input_messages": Refused("send them in input", ([],)),
    "context_management": Refused("nothing is compacted", ([],)),
    "prompt": Refused("prompts are not stored here; send instructions and input"),
    "truncation": Refused("a prompt that is too long is refused, not cut", ("disabled",)),
    "max_tool_calls": Refused(_NO_BUILT_IN_TOOLS),
    "access_programs": Refused(_OPENAIS_OWN),
    "image": Refused(TEXT_ONLY),
}  # fmt: skip

INCLUDED = ("message.output_text.logprobs", "reasoning.encrypted_content")

_OWN = Label("an item's own")
_NAMESPACE = Refused("tools are in no namespaces here")
_PROGRAMS = "programs that call tools are OpenAI's own"
_ASYNC = Refused(_OPENAIS_OWN, (False,))

_CALLED: Rules = {"type": Works(), "call_id": Works()}
_OF_AN_ITEM: Rules = {"id": _OWN, "status": _OWN, "caller": Refused(_PROGRAMS)}
_OF_A_CALL: Rules = {**_OF_AN_ITEM, "namespace": _NAMESPACE, "async": _ASYNC}
_OUTPUT = Works("text, or parts of text")

INPUT_ITEMS: Mapping[str, Rules] = {
    "message": {
        "type": Works("or left out"),
        "role": Works("user, assistant, system or developer, as the model's chat template has them"),
        "content": Works("text, or parts of text; a user's with pictures"),
        "id": _OWN,
        "status": Works("in_progress or incomplete, of an assistant's message that is the last: it is gone on with"),
        "phase": Label("where in OpenAI's answers a message stood"),
    },
    "function_call": {**_CALLED, "name": Works(), "arguments": Works(), **_OF_A_CALL},
    "function_call_output": {
        **_CALLED,
        "output": _OUTPUT,
        "name": Label("the call's own"),
        **_OF_AN_ITEM,
        "namespace": _NAMESPACE,
    },
    "custom_tool_call": {**_CALLED, "name": Works(), "input": Works(), **_OF_A_CALL},
    "custom_tool_call_output": {**_CALLED, "output": _OUTPUT, **_OF_AN_ITEM},
    "reasoning": {
        "type": Works(),
        "content": Works("parts of text, as the model's chat template has earlier reasoning"),
        "summary": Works("where there is no content"),
        "encrypted_content": Refused("reasoning is not encrypted here; send content"),
        "id": _OWN,
        "status": _OWN,
    },
}
"""By type. Every other is refused."""

TEXT_PARTS: Mapping[str, Rules] = {
    **{
        kind: {
            "type": Works(),
            "text": Works(),
            "annotations": Refused(TEXT_ONLY, ([],)),
            "logprobs": Label("of an answer that is sent back"),
            "prompt_cache_breakpoint": CACHE_HINT,
        }
        for kind in ("input_text", "output_text", "text", "reasoning_text", "summary_text")
    },
    "refusal": {"type": Works(), "refusal": Works()},
}
"""Of a message, a tool's output or reasoning. Files and sound are refused by their type."""

PICTURE_PARTS: Mapping[str, Rules] = {
    "input_image": {
        "type": Works("with target.multimodal: see pictures.md"),
        "image_url": Works("a text, as a chat's url"),
        "detail": DETAIL,
        "file_id": Refused("files are not stored here; send image_url"),
        "prompt_cache_breakpoint": CACHE_HINT,
    },
}
"""Of a user's message."""

TOOLS: Mapping[str, Rules] = {
    "function": {
        **plain("type", "name", "description", "parameters"),
        "strict": Works("true: arguments keep to parameters"),
        "defer_loading": Works("as the model's chat template has it"),
        "output_schema": Refused(_OPENAIS_OWN),
        "allowed_callers": Refused(_PROGRAMS, (["direct"],)),
        "async": _ASYNC,
    },
    "custom": {
        **plain("type", "name", "description"),
        "format": Works("text"),
        "defer_loading": Refused(_OPENAIS_OWN, (False,)),
        "allowed_callers": Refused(_PROGRAMS, (["direct"],)),
        "async": _ASYNC,
    },
}
"""By type. OpenAI's built-in tools are refused by theirs."""

TOOL_CHOICE: Rules = {"type": Works(), "name": Works()}
