"""Prompts that start alike share their first hashes; the same prompt looks the same over gRPC and HTTP."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from outrider.actors.replica_calls import ChatMessage, ChatPrompt, GenerationRequest
from outrider.actors.serving.routing.request_profile import (
    MAX_BYTES,
    USUAL_ANSWER_TOKENS,
    block_tokens,
    of_body,
    of_generation,
    text_fingerprint,
    token_fingerprint,
)
from tests.support.fuzz.protobuf import FUZZ


def shared(one, other):
    """Blocks at the beginning that are the same."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def test_prompts_share_the_blocks_before_they_differ():
    system = "You are helpful. " * 40  # 680 bytes: 5 whole blocks of 128
    one, other = text_fingerprint(system + "Why?" * 100), text_fingerprint(system + "What?" * 100)
    assert shared(one, other) == len(system) // 128 == 5
    assert len(one) == 8
    assert set(one[5:]).isdisjoint(other), "a hash is of all that comes before it"
    assert set(text_fingerprint("a" * 256)).isdisjoint(text_fingerprint("b" * 128 + "a" * 256)[1:])


def test_token_ids_and_text_do_not_meet():
    assert set(token_fingerprint([0x20202020] * 64)).isdisjoint(text_fingerprint(" " * 256))


def test_a_fingerprint_has_whole_blocks_of_any_text_up_to_a_limit():
    assert text_fingerprint("short") == token_fingerprint(range(31)) == ()
    assert len(token_fingerprint(range(32))) == 1
    blocks = len(token_fingerprint(range(300_000)))
    assert sum(block_tokens(number) for number in range(blocks)) == MAX_BYTES // 4
    for text in ("\ud800" * 200, "\x00" * 200, "語" * 200):
        assert text_fingerprint(text)


TEXT = "Once upon a time there was a router. " * 20
MESSAGES = [{"role": "system", "content": "Be brief. " * 30}, {"role": "user", "content": TEXT}]


def over_grpc(**fields):
    return of_generation(GenerationRequest("r", **fields))


def over_http(**body):
    return of_body(body, "model")


@pytest.mark.parametrize(
    ("grpc", "http"),
    [
        (over_grpc(prompt_text=TEXT), over_http(prompt=TEXT)),
        (over_grpc(prompt_token_ids=tuple(range(99))), over_http(prompt=list(range(99)))),
        (over_grpc(prompt_token_ids=tuple(range(99))), over_http(token_ids=list(range(99)))),
        (
            over_grpc(prompt_chat=ChatPrompt(tuple(ChatMessage(**message) for message in MESSAGES))),
            over_http(messages=MESSAGES),
        ),
        (over_grpc(prompt_text=TEXT, apply_chat_template=True), over_http(messages=MESSAGES[1:])),
        (over_http(messages=MESSAGES), over_http(input=MESSAGES)),
    ],
)
def test_the_same_prompt_looks_the_same_through_every_route(grpc, http):
    assert grpc.fingerprint
    assert (grpc.fingerprint, grpc.prompt_tokens) == (http.fingerprint, http.prompt_tokens)


def test_what_tools_said_and_what_they_are_is_part_of_the_prompt():
    call = {"arguments": "a" * 40}
    assert over_http(input=[call, {"output": "b" * 40}]).prompt_tokens == 20
    assert over_http(messages=[{"content": [{"content": [{"text": "b" * 80}]}]}]).prompt_tokens == 20
    with_tools = over_http(messages=MESSAGES, tools=[{"type": "function", "function": {"name": "f"}}])
    assert shared(with_tools.fingerprint, over_http(messages=MESSAGES).fingerprint) == 0


@pytest.mark.parametrize(
    "shape",
    [
        lambda url: {"messages": [{"content": [{"image_url": {"url": url}}]}]},
        lambda url: {"messages": [{"content": [{"source": {"data": url}}]}]},
        lambda url: {"input": [{"content": [{"image_url": url}]}]},
    ],
)
def test_a_picture_counts_as_some_hundred_tokens_and_tells_prompts_apart(shape):
    one, other = (over_http(**shape("data:image/png;base64," + "A" * 9000 + end)) for end in "BC")
    assert one.prompt_tokens == other.prompt_tokens == 512
    assert set(one.fingerprint).isdisjoint(other.fingerprint)
    assert over_http(**shape("word " * 2000)).prompt_tokens == over_http(**shape("語" * 10_000)).prompt_tokens == 2500


def test_what_a_request_costs():
    assert over_grpc(prompt_token_ids=(1,) * 50, sampling={"max_tokens": 7, "n": 3}).tokens == 50 + 21
    assert over_grpc(prompt_text="x" * 40).tokens == 10 + USUAL_ANSWER_TOKENS
    assert over_http(messages=[], max_completion_tokens=9).answer_tokens == 9
    assert over_http(input="hi", max_output_tokens=1).answer_tokens == 1
    assert over_http(token_ids=[1], sampling_params={"max_tokens": 7, "n": 2}).answer_tokens == 14
    assert over_http(prompt=["ab" * 4], max_tokens=5).tokens == 2 + 5
    assert over_http(prompt=["ab" * 4, [1, 2, 3]], max_tokens=5, n=2).tokens == 2 + 3 + 20


def test_who_wants_drafts():
    assert over_grpc(prompt_text="a").wants_drafts
    assert not over_grpc(prompt_text="a", speculation=False).wants_drafts
    assert not over_grpc(prompt_text="a", num_speculative_tokens=0).wants_drafts
    assert over_http(prompt="a", vllm_xargs={"speculation.num_speculative_tokens": 2}).wants_drafts
    for off in ({"speculation.num_speculative_tokens": 0}, {"speculation.enabled": 0}):
        assert not over_http(prompt="a", vllm_xargs=off).wants_drafts
        assert not over_http(token_ids=[1], sampling_params={"extra_args": off}).wants_drafts


KEYS = (
    "messages", "input", "prompt", "token_ids", "tools", "system", "instructions", "n", "max_tokens", "model", "role",
    "content", "text", "output", "image_url", "vllm_xargs", "sampling_params",
)  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.just("\ud800"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
)


@settings(FUZZ, max_examples=100)
@given(st.dictionaries(st.sampled_from(KEYS), JSON))
@example({"prompt": "a", "n": 1 << 70, "max_tokens": 1e400})
def test_any_json_is_profiled_without_an_error(body):
    routed = over_http(**body)
    assert routed is None or (routed.tokens * 1.0 >= 0 and routed.answer_tokens < 1 << 24)


def test_prompts_of_another_adapter_share_nothing():
    prompt = "You are helpful. " * 40
    asked = {
        name: (over_grpc(prompt_text=prompt, adapter=name), over_http(prompt=prompt, model=name or "model"))
        for name in (None, "one", "other")
    }
    for grpc, http in asked.values():
        assert grpc.fingerprint == http.fingerprint
    blocks = [block for grpc, _ in asked.values() for block in grpc.fingerprint]
    assert len(set(blocks)) == len(blocks) == 15
    assert asked[None][0].fingerprint == text_fingerprint(prompt)
