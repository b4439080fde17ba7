"""What one request may have a process do while everybody else waits: refused by its field, on either API."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf import struct_pb2
from ray.serve.exceptions import BackPressureError
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind

from outrider.actors.openai_calls import Endpoint, OpenAIRequest
from outrider.actors.replica_calls import GenerationRequest, RequestError, TokenizeRequest, TokenLogprob, TokenLogprobs
from outrider.actors.request_costs import MAX_ALLOWED_OF_ALL_ANSWERS as MANY_ALLOWED
from outrider.actors.request_costs import MAX_LISTED_OF_ALL_ANSWERS, MAX_MESSAGES, MAX_TOOLS, USUAL_ANSWER_TOKENS
from outrider.actors.serving.admission import Admission
from outrider.actors.serving.grpc.validation import ServedModel, to_generation_request, to_tokenize_request
from outrider.actors.serving.http.body import decode_json_object
from outrider.actors.serving.http.routes import MAX_PARSED_VALUES, to_message
from outrider.actors.serving.openai.checked_engine import check_logprobs, end_in_one_piece
from outrider.actors.serving.openai.door import to_openai_request
from outrider.actors.vllm_seam.engine_requests import sampling_params
from outrider.cluster.limits import LimitsConfig
from outrider.v1 import generation_pb2 as pb

LIMITS = LimitsConfig(max_logprobs=8192, max_prompt_chars=1024, max_tokenize_chars=1024)
USER = {"role": "user", "content": "x"}
SAID = pb.ChatMessage(role="user", content="x")


def http(endpoint: Endpoint = "completions", **body: Any) -> OpenAIRequest:
    asked = {"completions": {"prompt": "x"}, "chat": {"messages": [USER]}, "responses": {"input": "x"}}
    return to_openai_request(
        endpoint, {**asked[endpoint], **body}, {}, num_speculative_tokens=4, request_id="r", limits=LIMITS
    )


def grpc(message: Any = None, *, stream: bool = False, **sampling: Any) -> GenerationRequest:
    message = message or pb.GenerateRequest(text="x", sampling=pb.SamplingParameters(**sampling))
    if stream:
        message = pb.GenerateStreamRequest.FromString(message.SerializeToString())
    return to_generation_request(message, ServedModel("m", 4, LIMITS), request_id="r")


def tokenize(**body: Any) -> OpenAIRequest:
    return to_openai_request("tokenize", body, {}, num_speculative_tokens=0, request_id="r", limits=LIMITS)


def grpc_tokenize(**chat: Any) -> TokenizeRequest:
    return to_tokenize_request(pb.TokenizeRequest(chat=pb.Chat(**chat)), LIMITS)


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def struct(**fields: Any) -> struct_pb2.Struct:
    made = struct_pb2.Struct()
    made.update(fields)
    return made


@pytest.mark.parametrize(
    ("request_", "tokens"),
    [
        (GenerationRequest("r", "x" * 400, sampling={"max_tokens": 1, "prompt_logprobs": 20}), 100 * 21 + 1),
        (GenerationRequest("r", "x" * 400, sampling={"max_tokens": 9, "prompt_logprobs": 0}), 100 + 9),
        (GenerationRequest("r", "x" * 400, sampling={"max_tokens": 9, "n": 3, "logprobs": 5}), 100 + 3 * 9 * 6),
        (GenerationRequest("r", "x" * 400, sampling={"logprobs": 1}), 100 + 2 * USUAL_ANSWER_TOKENS),
        (http(prompt="x" * 400, max_tokens=1, prompt_logprobs=20), 100 * 21 + 1),
        (http(prompt="x" * 400, max_tokens=1, echo=True, logprobs=3), 100 * 4 + 4),
        (http(prompt=["x" * 400] * 2, max_tokens=1, n=2, logprobs=3), 200 + 4 * 4),
        (http("chat", max_tokens=1, logprobs=True, top_logprobs=20), 21),
        (http("chat", max_tokens=1, logprobs=True), 1),
        (http("chat", messages=[{**USER, "content": "x" * 400}], max_tokens=1, echo=True, top_logprobs=4), 100 * 5 + 1),
        (
            http(
                "responses", max_output_tokens=2, top_logprobs=4, include=["message.output_text.logprobs"], stream=True
            ),
            2 * 5,
        ),
        (http("chat", max_tokens=1, documents=[{"text": "x" * 396}]), 100 + 1),
        (http(max_tokens=1, n=2, allowed_token_ids=[5] * 30), 2 * 31),
        (grpc(max_tokens=1, n=2, allowed_token_ids=[5] * 30), 2 * 31),
    ],
)
def test_log_probabilities_documents_and_allowed_tokens_count_as_tokens_in_flight(request_: Any, tokens: int) -> None:
    admission = Admission(LimitsConfig())
    with admission.hold(request_):
        assert admission.tokens == tokens


def test_prompts_with_log_probabilities_fill_the_server_before_others_do() -> None:
    admission = Admission(LimitsConfig(max_tokens_in_flight=30_000))
    plain = GenerationRequest("r", "x" * 4000, sampling={"max_tokens": 1})
    dear = GenerationRequest("r", "x" * 4000, sampling={"max_tokens": 1, "prompt_logprobs": 20})
    with admission.hold(dear), pytest.raises(BackPressureError), admission.hold(dear):
        pass
    with admission.hold(dear), admission.hold(plain):
        pass


REFUSED: dict[str, tuple[str, Callable[[], object]]] = {
    "ids' log-probabilities, gRPC": (
        "sampling.prompt_logprobs",
        lambda: grpc(
            pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * 391), sampling=pb.SamplingParameters(prompt_logprobs=20))
        ),
    ),
    "each answer's, gRPC": (
        "sampling.prompt_logprobs",
        lambda: grpc(
            pb.GenerateRequest(
                token_ids=pb.TokenIds(ids=[1] * 200), sampling=pb.SamplingParameters(prompt_logprobs=20, n=2)
            )
        ),
    ),
    "ids' log-probabilities, HTTP": ("prompt_logprobs", lambda: http(prompt=[1] * 391, prompt_logprobs=20)),
    "many prompts' together": ("prompt_logprobs", lambda: http(prompt=["x" * 36] * 28, n=2, prompt_logprobs=20)),
    "echoed ones": ("logprobs", lambda: http(prompt=[1] * 391, echo=True, logprobs=20)),
    "an answer's in one piece, gRPC": ("sampling.logprobs", lambda: grpc(max_tokens=391, logprobs=20)),
    "all answers' in one piece, gRPC": ("sampling.logprobs", lambda: grpc(max_tokens=200, logprobs=20, n=2)),
    "an answer's in one piece": ("logprobs", lambda: http(max_tokens=391, logprobs=20)),
    "a chat's in one piece": (
        "top_logprobs",
        lambda: http("chat", max_completion_tokens=391, logprobs=True, top_logprobs=20),
    ),
    "a response's in one piece": (
        "top_logprobs",
        lambda: http("responses", max_output_tokens=391, top_logprobs=20, include=["message.output_text.logprobs"]),
    ),
    "biases for 64 answers, gRPC": (
        "sampling.logit_bias",
        lambda: grpc(n=64, logit_bias=dict.fromkeys(range(65), 1.0)),
    ),
    "biases for 64 answers": ("logit_bias", lambda: http(n=64, logit_bias={str(i): 1 for i in range(65)})),
    "bad words for 64 answers, gRPC": ("sampling.bad_words", lambda: grpc(n=64, bad_words=["no"] * 65)),
    "bad words for 256 answers": ("bad_words", lambda: http(prompt=["x"] * 4, n=64, bad_words=["no"] * 17)),
    "stop tokens for 64 answers, gRPC": ("sampling.stop_token_ids", lambda: grpc(n=64, stop_token_ids=[1] * 65)),
    "stop tokens for 256 answers": ("stop_token_ids", lambda: http(prompt=["x"] * 4, n=64, stop_token_ids=[1] * 17)),
    "allowed tokens, gRPC": ("sampling.allowed_token_ids", lambda: grpc(allowed_token_ids=[1] * (MANY_ALLOWED + 1))),
    "allowed tokens for 64 answers, gRPC": (
        "sampling.allowed_token_ids",
        lambda: grpc(n=64, allowed_token_ids=[1] * (MANY_ALLOWED // 64 + 1)),
    ),
    "allowed tokens for 64 answers": (
        "allowed_token_ids",
        lambda: http(n=64, allowed_token_ids=[1] * (MANY_ALLOWED // 64 + 1)),
    ),
    "allowed tokens for two prompts": (
        "allowed_token_ids",
        lambda: http(prompt=["x"] * 2, allowed_token_ids=[1] * (MANY_ALLOWED // 2 + 1)),
    ),
    "messages, gRPC": (
        "chat.messages",
        lambda: grpc(pb.GenerateRequest(chat=pb.Chat(messages=[SAID] * (MAX_MESSAGES + 1)))),
    ),
    "messages, HTTP": ("messages", lambda: http("chat", messages=[USER] * (MAX_MESSAGES + 1))),
    "messages to tokenise": (
        "messages",
        lambda: tokenize(messages=[USER] * (MAX_MESSAGES + 1)),
    ),
    "tools to tokenise": ("tools", lambda: tokenize(messages=[USER], tools=[tool("x" * 1025)])),
    "tools and messages to tokenise": (
        "messages",
        lambda: tokenize(messages=[{**USER, "content": "x" * 600}], tools=[tool("x" * 600)]),
    ),
    "a template's variables to tokenise": (
        "chat_template_kwargs",
        lambda: tokenize(messages=[USER], chat_template_kwargs={"x" * 1025: 1}),
    ),
    "a long role to tokenise": ("chat", lambda: grpc_tokenize(messages=[pb.ChatMessage(role="x" * 1025)])),
    "a long name to tokenise": ("chat", lambda: grpc_tokenize(messages=[pb.ChatMessage(role="x", name="x" * 1025)])),
    "a template's variables to tokenise, gRPC": (
        "chat",
        lambda: grpc_tokenize(messages=[SAID], chat_template_kwargs=struct(x="x" * 1025)),
    ),
    "tools": ("tools", lambda: http("chat", tools=[{"type": "function"}] * (MAX_TOOLS + 1))),
    "a response's tools": ("tools", lambda: http("responses", tools=[{"type": "function"}] * (MAX_TOOLS + 1))),
    "a long prompt, gRPC": ("text", lambda: grpc(pb.GenerateRequest(text="x" * 1025))),
    "a long role": (
        "chat",
        lambda: grpc(pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="x" * 1025, content="x")]))),
    ),
    "a long prompt": ("prompt", lambda: http(prompt="x" * 1025)),
    "long prompts together": ("prompt", lambda: http(prompt=["x" * 513] * 2)),
    "long keys of tools": (
        "tools",
        lambda: http("chat", tools=[{"type": "function", "function": {"parameters": {"x" * 1025: 1}}}]),
    ),
    "long tools": ("tools", lambda: http("chat", tools=[{"type": "function", "function": {"name": "x" * 1025}}])),
    "a long message": ("messages", lambda: http("chat", messages=[{**USER, "content": "x" * 1025}])),
    "a long item": ("input", lambda: http("responses", input=[{**USER, "content": "x" * 1025}])),
    "n as text": ("n", lambda: http(n="100000")),
    "max_tokens as text": ("max_tokens", lambda: http(max_tokens="100000")),
    "a temperature as text": ("temperature", lambda: http("chat", temperature="99")),
    "stream as text": ("stream", lambda: http(stream="no", logprobs=20, max_tokens=391)),
    "n with a point": ("n", lambda: http(n=100000.0)),
    "log-probabilities with a point": ("prompt_logprobs", lambda: http(prompt=[1] * 391, prompt_logprobs=20.0)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_have_everybody_wait_is_refused_by_its_field(name: str) -> None:
    field, ask = REFUSED[name]
    with pytest.raises(RequestError) as refused:
        ask()
    assert refused.value.field == field


def test_what_is_at_the_limit_passes() -> None:
    grpc(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * 390), sampling=pb.SamplingParameters(prompt_logprobs=20)))
    http(prompt=[1] * 390, prompt_logprobs=20)
    assert grpc(max_tokens=390, logprobs=20).max_tokens == http(max_tokens=390, logprobs=20).max_tokens == 390
    http(n=64, logit_bias={str(i): 1 for i in range(MAX_LISTED_OF_ALL_ANSWERS // 64)})
    http(allowed_token_ids=list(range(MANY_ALLOWED)))
    grpc(n=64, allowed_token_ids=[1] * (MANY_ALLOWED // 64))
    http("chat", messages=[{**USER, "content": ""}] * 250)  # with their roles 1,000 characters
    assert http(n=2.0, max_tokens=3.0).body == {"prompt": "x", "n": 2, "max_tokens": 3}


def test_an_answer_that_is_streamed_may_be_as_long_as_it_likes() -> None:
    assert grpc(stream=True, max_tokens=100_000, logprobs=20).max_tokens == 100_000
    assert http(stream=True, max_tokens=100_000, logprobs=20).max_tokens == 100_000


def test_one_in_one_piece_without_max_tokens_ends_where_its_log_probabilities_do() -> None:
    def over_grpc(request: GenerationRequest) -> int | None:
        return sampling_params(request, 10, 50_000, limits=LIMITS).max_tokens

    assert over_grpc(grpc(logprobs=20)) == 390
    assert over_grpc(grpc(logprobs=20, n=2)) == 195
    assert over_grpc(grpc()) == over_grpc(grpc(stream=True, logprobs=20)) == 50_000 - 10

    def over_http(**settings: Any) -> int | None:
        end_in_one_piece(params := SamplingParams(**settings), LIMITS)
        return params.max_tokens

    whole, deltas = RequestOutputKind.FINAL_ONLY, RequestOutputKind.DELTA
    assert over_http(max_tokens=50_000, logprobs=20, output_kind=whole) == 390
    assert over_http(max_tokens=50_000, output_kind=whole) == over_http(max_tokens=50_000, logprobs=20) == 50_000
    assert over_http(max_tokens=50_000, logprobs=20, output_kind=deltas) == 50_000


def test_the_target_counts_the_tokens_of_a_text() -> None:
    """The door only estimates them."""
    request = grpc(pb.GenerateRequest(text="x" * 999, sampling=pb.SamplingParameters(prompt_logprobs=20)))
    sampling_params(request, 390, 50_000, limits=LIMITS)
    with pytest.raises(RequestError, match=r"sampling\.prompt_logprobs: 8211 log-probabilities"):
        sampling_params(request, 391, 50_000, limits=LIMITS)
    params = SamplingParams(prompt_logprobs=20)
    check_logprobs({"prompt_token_ids": [1] * 390}, params, LIMITS)
    with pytest.raises(VLLMValidationError) as refused:
        check_logprobs({"prompt_token_ids": [1] * 391}, params, LIMITS)
    assert refused.value.parameter == "prompt_logprobs"


def test_a_picture_is_no_text_to_tokenise() -> None:
    url = "data:image/png;base64," + "A" * 5000
    with pytest.raises(RequestError, match="takes no pictures"):  # which is all that is wrong with it
        http("chat", messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}])


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [USER] * 10_000},
        {"chat_template_kwargs": {f"k{number}": 1 for number in range(40_000)}},
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f"}}] * 10_000}]},
        {"prompt": [[1]] * 40_000},
        {"stop": ["x"] * 40_000},
    ],
    ids=["messages", "members", "tool calls", "lists", "texts"],
)
def test_what_takes_long_to_read_weighs_more_than_a_number(body: dict[str, Any]) -> None:
    most = LimitsConfig().max_request_values
    with pytest.raises(RequestError, match="holds too many values"):
        decode_json_object(json.dumps(body).encode(), most)
    decode_json_object(json.dumps({"prompt": [1] * (most - 100)}).encode(), most)
    decode_json_object(json.dumps({"prompt": 'a, [b], {"c"} ' * 100_000}).encode(), most)


@pytest.mark.parametrize(
    "body", [{"sampling": {"stop": ["x"] * (MAX_PARSED_VALUES + 1)}}, {"token_ids": {"ids": [1] * 20_000}}]
)
def test_json_that_protobuf_would_take_long_to_parse_is_sent_over_grpc(body: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="more over gRPC"):
        to_message(body, pb.GenerateStreamRequest())


def test_a_schema_of_megabytes_is_not_read_before_it_is_refused() -> None:
    """By the target, which counts it; here it need not even be JSON."""
    schema = "{" + "[" * (1 << 20)
    message = pb.GenerateRequest(
        text="x", sampling=pb.SamplingParameters(structured_outputs=pb.StructuredOutputs(json=schema))
    )
    assert grpc(message).sampling["structured_outputs"] == {"json": schema}


def test_log_probabilities_travel_as_plain_tuples() -> None:
    """A call of Python's own for each of them would take most of a replica's second."""
    many = tuple(TokenLogprobs(1, -0.5, 1, (TokenLogprob(2, -1.0),)) for _ in range(3))
    assert pickle.loads(pickle.dumps(many)) == many
    assert isinstance(many[0], tuple)
    assert isinstance(many[0].top[0], tuple)
