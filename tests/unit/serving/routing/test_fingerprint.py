"""Prompts that start alike share their first hashes; the same prompt looks the same over gRPC and HTTP."""

import pytest

from outrider.actors.openai_calls import OpenAIRequest
from outrider.actors.replica_calls import ChatMessage, ChatPrompt, GenerationRequest
from outrider.actors.serving.routing.request_profile import (
    MAX_BYTES,
    USUAL_ANSWER_TOKENS,
    block_tokens,
    profile,
    text_fingerprint,
    token_fingerprint,
)


def shared(one, other):
    """Blocks at the beginning that are the same."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def test_prompts_share_the_blocks_before_they_differ():
    system = "You are helpful. " * 40  # 680 bytes: 5 whole blocks of 128
    one, other = text_fingerprint(system + "Why?" * 100), text_fingerprint(system + "What?" * 100)
    assert shared(one, other) == len(system) // 128 == 5
    assert len(one) == 8
    assert set(one[5:]).isdisjoint(other), "a hash is of all that comes before it"


def test_the_same_text_elsewhere_is_another_block():
    assert set(text_fingerprint("a" * 256)).isdisjoint(text_fingerprint("b" * 128 + "a" * 256)[1:])


def test_a_short_prompt_has_no_blocks():
    assert text_fingerprint("short") == ()
    assert token_fingerprint(range(31)) == ()
    assert len(token_fingerprint(range(32))) == 1


def test_blocks_get_longer_and_end():
    ids = list(range(300_000))
    assert len(token_fingerprint(ids)) == 192
    assert sum(block_tokens(number) for number in range(192)) == MAX_BYTES // 4
    assert block_tokens(0) == 32
    assert block_tokens(191) == 2048


def test_token_ids_and_text_do_not_meet():
    assert set(token_fingerprint([0x20202020] * 64)).isdisjoint(text_fingerprint(" " * 256))


@pytest.mark.parametrize("text", ["\ud800" * 200, "\x00" * 200, "語" * 200])
def test_any_text_has_a_fingerprint(text):
    assert text_fingerprint(text)


TEXT = "Once upon a time there was a router. " * 20
MESSAGES = [{"role": "system", "content": "Be brief. " * 30}, {"role": "user", "content": TEXT}]


def over_grpc(**fields):
    return profile([GenerationRequest("r", **fields)])


def over_http(endpoint, **body):
    return profile([OpenAIRequest(endpoint, "r", body)])


@pytest.mark.parametrize(
    ("grpc", "http"),
    [
        (over_grpc(prompt_text=TEXT), over_http("completions", prompt=TEXT)),
        (over_grpc(prompt_token_ids=tuple(range(99))), over_http("completions", prompt=list(range(99)))),
        (
            over_grpc(prompt_chat=ChatPrompt(tuple(ChatMessage(**message) for message in MESSAGES))),
            over_http("chat", messages=MESSAGES),
        ),
        (
            over_grpc(prompt_text=TEXT, apply_chat_template=True),
            over_http("chat", messages=[{"role": "user", "content": [{"type": "text", "text": TEXT}]}]),
        ),
    ],
)
def test_grpc_and_http_look_the_same(grpc, http):
    assert grpc.fingerprint
    assert (grpc.fingerprint, grpc.prompt_tokens) == (http.fingerprint, http.prompt_tokens)


@pytest.mark.parametrize(
    "body",
    [
        {"instructions": MESSAGES[0]["content"], "input": TEXT},
        {"input": MESSAGES},
        {"input": [MESSAGES[0], {"role": "user", "content": [{"type": "input_text", "text": TEXT}]}]},
    ],
)
def test_a_response_looks_like_the_chat_it_is(body):
    chat, response = over_http("chat", messages=MESSAGES), over_http("responses", **body, max_output_tokens=9)
    assert (response.fingerprint, response.prompt_tokens) == (chat.fingerprint, chat.prompt_tokens)
    assert response.answer_tokens == 9


def test_what_tools_said_is_part_of_a_response():
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "a" * 40}
    output = {"type": "function_call_output", "call_id": "c", "output": "b" * 39}
    assert over_http("responses", input=[call, output]).prompt_tokens == 20


def test_tools_are_part_of_the_beginning():
    tools = [{"type": "function", "function": {"name": "f"}}]
    with_tools = over_http("chat", messages=MESSAGES, tools=tools)
    assert shared(with_tools.fingerprint, over_http("chat", messages=MESSAGES).fingerprint) == 0


def test_what_a_request_costs():
    assert over_grpc(prompt_token_ids=(1,) * 50, sampling={"max_tokens": 7, "n": 3}).tokens == 50 + 21
    assert over_grpc(prompt_text="x" * 40).tokens == 10 + USUAL_ANSWER_TOKENS
    assert over_http("chat", messages=[], max_completion_tokens=9).answer_tokens == 9
    assert over_http("completions", prompt=["ab" * 4, [1, 2, 3]], max_tokens=5, n=2).tokens == 2 + 3 + 20


def test_who_wants_drafts():
    assert over_grpc(prompt_text="a").wants_drafts
    assert not over_grpc(prompt_text="a", speculation=False).wants_drafts
    assert not over_grpc(prompt_text="a", num_speculative_tokens=0).wants_drafts
    assert not profile([OpenAIRequest("chat", "r", {}, {"num_speculative_tokens": 0})]).wants_drafts


@pytest.mark.parametrize("args", [(), ("abort",), (OpenAIRequest("models", "r"),), (OpenAIRequest("tokenize", "r"),)])
def test_other_calls_are_no_generation(args):
    assert profile(args) is None


@pytest.mark.parametrize(
    "body",
    [{}, {"messages": None}, {"messages": [1, {"content": 3}]}, {"messages": "hi"}, {"messages": [], "n": "x"}],
)
def test_a_malformed_body_is_left_to_the_engine(body):
    assert over_http("chat", **body).answer_tokens == USUAL_ANSWER_TOKENS


@pytest.mark.parametrize("prompt", [None, [], [[-1]], [1, "a"], {"a": 1}, [[1 << 40]]])
def test_a_malformed_prompt_is_left_to_the_engine(prompt):
    assert over_http("completions", prompt=prompt).fingerprint == ()


def test_prompts_of_another_adapter_share_nothing():
    prompt = "You are helpful. " * 40
    asked = {
        name: [
            profile([GenerationRequest("r", prompt_text=prompt, adapter=name)]),
            profile([OpenAIRequest("completions", "r", {"prompt": prompt}, adapter=name)]),
        ]
        for name in (None, "one", "other")
    }
    for grpc, http in asked.values():
        assert grpc.fingerprint == http.fingerprint
    blocks = [block for grpc, _ in asked.values() for block in grpc.fingerprint]
    assert len(set(blocks)) == len(blocks) == 15
    assert asked[None][0].fingerprint == text_fingerprint(prompt), "without one as ever"
