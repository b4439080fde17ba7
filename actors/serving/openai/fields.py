"""Every request field of OpenAI's and vLLM's, whether it works here, and how a body is held against that.

The door refuses by these tables, the tables of docs/openai.md are made from them, and a test holds them against vLLM's
own request models and OpenAI's own parameter types, so that a field that either adds cannot be dropped silently.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from outrider.actors.replica_calls import RequestError


@dataclass(frozen=True)
class Works:
    """The field does what its documentation says, in speculated rounds too.

    shape: what must be there before vLLM's own validation looks at it. inner: keys of the object, or of the objects in
    the list; None: free.
    """

    note: str = ""
    shape: Literal["any", "object", "objects"] = "any"
    inner: Mapping[str, Works | Label | Refused] | None = None


@dataclass(frozen=True)
class Label:
    """Taken and dropped: by its own definition it changes no answer."""

    note: str


@dataclass(frozen=True)
class Refused:
    """400 with the reason, unless the value asks for nothing: null, or one of neutral."""

    reason: str
    neutral: tuple[Any, ...] = field(default=())


Rule = Works | Label | Refused
Rules = Mapping[str, Rule]


def plain(*names: str) -> dict[str, Rule]:
    """Fields that do what their documentation says, and no more is to be said of them."""
    return dict.fromkeys(names, Works())


def held_against(rules: Rules, body: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """The body without labels and without refused fields that ask for nothing.

    Raises RequestError naming the first field that is unknown, refused or of the wrong shape.
    """
    kept: dict[str, Any] = {}
    for name, value in body.items():
        where = f"{path}.{name}" if path else name
        rule = rules.get(name)
        if rule is None:
            raise _unknown(name, where, rules)
        if isinstance(rule, Refused):
            if value is not None and not any(_same(value, neutral) for neutral in rule.neutral):
                raise RequestError(where, f"is not supported: {rule.reason}", "leave it out")
        elif isinstance(rule, Works):
            kept[name] = _inside(rule, value, where)
    return kept


def _inside(rule: Works, value: Any, where: str) -> Any:
    if value is None:
        return value
    if rule.shape == "object" and not isinstance(value, dict):
        raise RequestError(where, "is no object", "send a JSON object")
    if rule.shape == "objects" and not isinstance(value, list):
        raise RequestError(where, "is no array", "send an array of JSON objects")
    if rule.inner is None:
        return value
    if isinstance(value, dict):
        return held_against(rule.inner, value, where)
    if isinstance(value, list):
        return [_item(rule, item, f"{where}.{index}") for index, item in enumerate(value)]
    return value


def _item(rule: Works, item: Any, where: str) -> Any:
    if isinstance(item, dict):
        assert rule.inner is not None
        return held_against(rule.inner, item, where)
    if rule.shape == "objects":
        raise RequestError(where, "is no object", "send a JSON object")
    return item


def _unknown(name: str, where: str, rules: Rules) -> RequestError:
    shown = name if len(name) <= 60 else name[:60] + "…"
    near = difflib.get_close_matches(shown, [key for key, rule in rules.items() if isinstance(rule, Works)], n=1)
    return RequestError(
        where if len(where) <= 120 else where[:120] + "…",
        f"{shown!r} is no field that is known here",
        f"did you mean {near[0]!r}?" if near else "leave it out",
    )


def _same(value: Any, neutral: Any) -> bool:
    """0 and 0.0 are the same, 0 and false are not."""
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)


TEXT_ONLY = "text in, text out"
CACHE_HINT = Label("a hint for OpenAI's cache")
DETAIL = Label("a hint for OpenAI's models; here the model has its own way")
_DISAGGREGATED = "prefill and decode are not split between engines here"
_RENDER_ONLY = "for vLLM's render endpoints, which are not served"

_SPECULATION: dict[str, Rule] = {
    "enabled": Works("false: no drafts for this request"),
    "num_speculative_tokens": Works("1 to the deployment's K: fewer drafts a round"),
    "verification": Works("`rejection`, `block` or `coupled`"),
}

JSON_SCHEMA: dict[str, Rule] = {
    **plain("name", "description", "schema"),
    "strict": Works("a grammar is always strict"),
}

_RESPONSE_FORMAT: dict[str, Rule] = {
    "type": Works(),
    "json_schema": Works(shape="object", inner=JSON_SCHEMA),
    **plain("structures", "triggers", "format"),
}

_STRUCTURED_OUTPUTS: dict[str, Rule] = {
    **plain("json", "regex", "choice", "grammar", "json_object", "structural_tag"),
    "disable_any_whitespace": Refused("set for the whole engine, not for a request", (False,)),
    "disable_additional_properties": Refused("set for the whole engine, not for a request", (False,)),
    "whitespace_pattern": Refused("no backend that compiles grammars here has one"),
}

_STREAM_OPTIONS: dict[str, Rule] = {
    "include_usage": Works("usage, and the request's speculation metrics, in a last event"),
    "continuous_usage_stats": Works("usage in every event"),
    "include_obfuscation": Refused("events are not padded", (False,)),
}

_REPETITION_DETECTION: dict[str, Rule] = {
    "max_pattern_size": Works("64 at most"),
    "min_pattern_size": Works(),
    "min_count": Works("times max_pattern_size 512 at most"),
}

_SHARED: dict[str, Rule] = {
    "model": Works("the served name, an adapter's, or left out"),
    "max_tokens": Works(),
    "n": Works("1 to 64"),
    "temperature": Works("0 (greedy) to 2"),
    "top_p": Works(),
    "top_k": Works(),
    "min_p": Works("on drafted tokens too"),
    "seed": Works("the same tokens with any drafter, or none; see speculation"),
    "stop": Works("4 at most"),
    **plain(
        "stop_token_ids",
        "include_stop_str_in_output",
        "ignore_eos",
        "min_tokens",
        "frequency_penalty",
        "presence_penalty",
    ),
    "repetition_penalty": Works("0.01 to 100"),
    "logit_bias": Works("on drafted tokens too"),
    "bad_words": Works(),
    "allowed_token_ids": Works(),
    "logprobs": Works("the model's own, before every sampling parameter; without stream `limits.max_logprobs` at once"),
    "prompt_logprobs": Works("not with stream; `limits.max_logprobs` at once"),
    "echo": Works("for completions not with stream and n above 1"),
    "stream": Works("one event a round"),
    "stream_options": Works(shape="object", inner=_STREAM_OPTIONS),
    "stream_interval": Works("tokens an event at least; rounds are gathered"),
    "response_format": Works("text, json_object, json_schema, structural_tag", "object", _RESPONSE_FORMAT),
    "structured_outputs": Works("one constraint", "object", _STRUCTURED_OUTPUTS),
    "repetition_detection": Works(shape="object", inner=_REPETITION_DETECTION),
    "skip_special_tokens": Works(),
    "spaces_between_special_tokens": Works("tokenizers without a fast implementation only, as in vLLM"),
    "add_special_tokens": Works(),
    "truncate_prompt_tokens": Works(),
    "truncation_side": Works("with truncate_prompt_tokens"),
    "cache_salt": Works("128 characters at most"),
    "return_token_ids": Works(),
    "return_tokens_as_token_ids": Works("with logprobs"),
    "request_id": Works("part of the answer's id; before the X-Request-Id header"),
    "speculation": Works("Outrider's own: see above", "object", _SPECULATION),
    "user": Label("names a user to OpenAI's abuse detection"),
    "safety_identifier": Label("names a user to OpenAI's abuse detection"),
    "prompt_cache_key": Label("a hint for OpenAI's cache; here prefixes are found by what they hold"),
    "thinking_token_budget": Refused("the speculative sampler does not count thinking tokens", (-1,)),
    "logprob_token_ids": Refused("the speculative sampler gives the likeliest tokens only; use logprobs", ([],)),
    "use_beam_search": Refused("beams are requests of one token each, which leaves nothing to speculate on", (False,)),
    "length_penalty": Refused("beam search only", (1.0,)),
    "watermarking": Refused("no watermark is configured", (False,)),
    "priority": Refused("the scheduler orders requests by arrival and size", (0,)),
    "session_id": Refused("requests of a session find their replica by their common prefix"),
    "routed_experts_prompt_start": Refused("routed experts are not returned", (0,)),
    "return_token_offsets": Refused(_RENDER_ONLY, (False,)),
    "mm_payload": Refused(_RENDER_ONLY, ("tensors",)),
    "return_mm_kwargs": Refused(_RENDER_ONLY),
    "kv_transfer_params": Refused(_DISAGGREGATED, ({},)),
    "ec_transfer_params": Refused(_DISAGGREGATED, ({},)),
    "vllm_xargs": Refused("no extension of vLLM's is loaded; for drafts see speculation", ({},)),
    "guided_json": Refused("removed from vLLM; use structured_outputs.json"),
    "guided_regex": Refused("removed from vLLM; use structured_outputs.regex"),
    "guided_choice": Refused("removed from vLLM; use structured_outputs.choice"),
    "guided_grammar": Refused("removed from vLLM; use structured_outputs.grammar"),
    "guided_decoding_backend": Refused("removed from vLLM, which picks the backend for each request"),
    "guided_whitespace_pattern": Refused("removed from vLLM"),
}

_TOOL: dict[str, Rule] = {
    "type": Works(),
    "function": Works(
        shape="object",
        inner={
            **plain("name", "description", "parameters"),
            "strict": Works("true: arguments keep to parameters"),
            "defer_loading": Works("as the model's chat template has it"),
        },
    ),
    "defer_loading": Works("as the model's chat template has it"),
}

_TOOL_CHOICE: dict[str, Rule] = {"type": Works(), "function": Works(shape="object", inner={"name": Works()})}

_TOOL_CALL: dict[str, Rule] = {
    "id": Works(),
    "type": Works(),
    "function": Works(shape="object", inner={"name": Works(), "arguments": Works()}),
    "index": Label("what a streamed answer numbers its calls with"),
}

_CONTENT_PART: dict[str, Rule] = {
    "type": Works("text, input_text, output_text, refusal, thinking; image_url with target.multimodal"),
    **plain("text", "refusal", "thinking"),
    "closed": Works("of a thinking part"),
    "image_url": Works(
        "with target.multimodal, and not of tokenize: see pictures.md",
        "object",
        {
            "url": Works("data:image/…;base64,… of png, jpeg, webp or gif, or of an allowed host"),
            "detail": DETAIL,
        },
    ),
    "name": Refused("tool references are for one family of models"),
    "cache_control": Label("a hint for other servers' caches"),
    "prompt_cache_breakpoint": CACHE_HINT,
    "uuid": Refused("pictures are told apart by what they hold"),
    **{
        name: Refused("of media pictures alone are taken, as image_url")
        for name in (
            "image_pil", "image_embeds", "input_audio", "audio_url", "audio_embeds", "video_url", "video_embeds",
            "data", "file",
        )
    },
}  # fmt: skip

_MESSAGE: dict[str, Rule] = {
    "role": Works(),
    "content": Works("text, or parts: text and pictures", inner=_CONTENT_PART),
    "name": Works("as the model's chat template has it"),
    "tool_calls": Works(shape="objects", inner=_TOOL_CALL),
    "tool_call_id": Works(),
    "tools": Works(shape="objects", inner=_TOOL),
    "reasoning": Works("as the model's chat template has it"),
    "reasoning_content": Works("the older name of reasoning"),
    "refusal": Refused("what a model said is content here"),
    "annotations": Refused(TEXT_ONLY, ([],)),
    "audio": Refused(TEXT_ONLY),
    "function_call": Refused("deprecated by OpenAI and not in vLLM; use tool_calls"),
    "task": Refused("for translation models"),
}

_CHAT_ONLY: dict[str, Rule] = {
    "messages": Works("roles as the model's chat template has them", "objects", _MESSAGE),
    "max_completion_tokens": Works("before max_tokens"),
    "top_logprobs": Works("0 to 20, with logprobs"),
    "tools": Works("where the model's way of calling them is known (openai.tool_call_parser)", "objects", _TOOL),
    "tool_choice": Works("none, auto, required, or one function", inner=_TOOL_CHOICE),
    "parallel_tool_calls": Works(),
    "reasoning_effort": Works("as the model's chat template has it"),
    "include_reasoning": Works("with openai.reasoning_parser"),
    "add_generation_prompt": Works(),
    "continue_final_message": Works(),
    "documents": Works("as the model's chat template has them"),
    "chat_template_kwargs": Works(shape="object"),
    "return_prompt_text": Works(),
    "chat_template": Refused("a template is a program, and clients' programs are not run; set openai.chat_template"),
    "media_io_kwargs": Refused(TEXT_ONLY, ({},)),
    "mm_processor_kwargs": Refused(TEXT_ONLY, ({},)),
    "modalities": Refused(TEXT_ONLY, (["text"], [])),
    "audio": Refused(TEXT_ONLY),
    "functions": Refused("deprecated by OpenAI and not in vLLM; use tools", ([],)),
    "function_call": Refused("deprecated by OpenAI and not in vLLM; use tool_choice", ("none",)),
    "metadata": Refused("answers are not stored", ({},)),
    "store": Refused("answers are not stored", (False,)),
    "moderation": Refused("nothing is moderated"),
    "prediction": Refused("drafts come from the drafter"),
    "prompt_cache_options": Refused("OpenAI's cache has them"),
    "prompt_cache_retention": Refused("prefixes stay cached as long as there is room", ("in_memory", "in-memory")),
    "service_tier": Refused("there is one tier", ("auto", "default")),
    "verbosity": Refused("OpenAI's models only", ("medium",)),
    "web_search_options": Refused("nothing is searched"),
}

_COMPLETIONS_ONLY: dict[str, Rule] = {
    "prompt": Works("text, token ids, a list of texts, or a list of lists of ids; 256 answers at most"),
    "suffix": Refused("filling in the middle needs a renderer that vLLM has for few models"),
    "prompt_embeds": Refused(TEXT_ONLY, ([],)),
    "best_of": Refused("removed from vLLM; use n", (1,)),
}

CHAT: Rules = {**_CHAT_ONLY, **_SHARED}
COMPLETIONS: Rules = {**_COMPLETIONS_ONLY, **_SHARED}

TOKENIZE: Rules = {
    "model": _SHARED["model"],
    "prompt": Works("one text for tokenize, or messages instead"),
    "messages": _CHAT_ONLY["messages"],
    "tools": Works(shape="objects", inner=_TOOL),
    "add_special_tokens": Works(),
    "return_token_strs": Works(),
    **{
        name: _CHAT_ONLY[name]
        for name in (
            "add_generation_prompt", "continue_final_message", "chat_template_kwargs", "chat_template",
            "media_io_kwargs", "mm_processor_kwargs",
        )
    },
}  # fmt: skip

DETOKENIZE: Rules = {"model": _SHARED["model"], "tokens": Works()}
