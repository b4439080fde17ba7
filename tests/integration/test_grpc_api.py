"""The gRPC API on a real pair: where tokens come from, chats, tokens and text, aborts and deadlines."""

import grpc
import pytest

from outrider.deploy.client.sync_client import OutriderError
from outrider.v1 import generation_pb2 as pb
from outrider.v1 import generation_pb2_grpc as rpc
from tests.support.cluster.serving import CHAT_TEMPLATE, HANG_GUARD_S, MAX_MODEL_LEN, wait_until, wait_until_idle
from tests.support.models.tiny_models import EOS

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

PROMPT = list(b"The quick brown fox jumps over the lazy dog. " * 3)
ACCEPTED, RECOVERED = pb.TOKEN_ORIGIN_ACCEPTED, pb.TOKEN_ORIGIN_RECOVERED
BONUS, PLAIN = pb.TOKEN_ORIGIN_BONUS, pb.TOKEN_ORIGIN_PLAIN
SAID = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]


@pytest.fixture
def stub(pair):
    with grpc.insecure_channel(pair.address) as channel:
        yield rpc.GenerationServiceStub(channel)


def check_origins(origins, metrics):
    """Origins of a whole answer against what vLLM counted for it: only a cut last round may have fewer tokens."""
    assert pb.TOKEN_ORIGIN_UNSPECIFIED not in origins
    accepted, own = origins.count(ACCEPTED), origins.count(BONUS) + origins.count(RECOVERED)
    cut = origins[-1] == ACCEPTED
    assert own == metrics.num_spec_steps - cut
    assert accepted == metrics.num_accepted_draft_tokens or (cut and accepted < metrics.num_accepted_draft_tokens)


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.7, "seed": 5}], ids=["greedy", "sampled"])
def test_origins_agree_with_what_was_counted(pair, sampling):
    with pair.client.stream(PROMPT, max_tokens=200, ignore_eos=True, **sampling) as stream:
        messages = list(stream)
    for message in messages:
        assert len(message.origins) == len(message.token_ids)
        if message.num_rounds == 1:  # accepted drafts, then one token of the target's own
            assert all(origin == ACCEPTED for origin in message.origins[:-1])
            assert message.origins[-1] != ACCEPTED or message is messages[-1]
    origins = [origin for message in messages for origin in message.origins]
    check_origins(origins, messages[-1].metrics.speculative_decoding)
    assert origins[0] == PLAIN, "the first token comes from the prompt's own pass"
    assert {ACCEPTED, RECOVERED} <= set(origins)
    assert sum(message.num_rounds for message in messages) <= len(origins)


def test_a_whole_answer_has_them_too_each_answer_its_own(pair):
    answer = pair.client.generate(PROMPT, n=3, temperature=0.9, seed=1, max_tokens=60, ignore_eos=True)
    for completion in answer.completions:
        assert len(completion.origins) == len(completion.token_ids)
        check_origins(list(completion.origins), completion.metrics.speculative_decoding)


def test_tokens_before_a_stop_keep_their_origins(pair):
    whole = pair.client.generate(PROMPT, temperature=0.0, max_tokens=100)
    stop = whole.text[40:43]
    cut = pair.client.generate(PROMPT, temperature=0.0, max_tokens=100, stop=stop)
    assert whole.text.startswith(cut.text)
    check_origins(list(cut.completions[0].origins), cut.metrics.speculative_decoding)


def test_without_drafts_every_token_is_plain(pair):
    answer = pair.client.generate(PROMPT, temperature=0.0, max_tokens=20, speculation=False)
    assert set(answer.completions[0].origins) == {PLAIN}


def chat(**fields):
    return pb.Chat(messages=[pb.ChatMessage(**message) for message in SAID], **fields)


def rendered(pair, **settings):
    """By the tokenizer alone."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(pair.config.target.model)
    return tokenizer.apply_chat_template(
        SAID, chat_template=CHAT_TEMPLATE, tokenize=True, return_dict=False, **settings
    )


def test_a_chat_is_what_the_tokenizers_own_template_makes_of_it(pair, stub):
    expected = rendered(pair, add_generation_prompt=True)
    found = stub.Tokenize(pb.TokenizeRequest(chat=chat(add_generation_prompt=True)))
    assert list(found.token_ids) == expected
    request = pb.GenerateRequest(chat=chat(add_generation_prompt=True))
    request.sampling.temperature, request.sampling.max_tokens = 0.0, 16
    answer = stub.Generate(request)
    assert answer.usage.prompt_tokens == len(expected)
    assert answer.token_ids == pair.client.generate(expected, temperature=0.0, max_tokens=16).token_ids


def test_tokens_become_the_text_they_came_from(stub):
    text = "Grüße, 世界!"
    found = stub.Tokenize(pb.TokenizeRequest(text=text, return_token_strs=True))
    assert (found.count, found.max_model_len) == (len(text.encode()), MAX_MODEL_LEN)
    assert len(found.token_strs) == found.count
    assert stub.Detokenize(pb.DetokenizeRequest(token_ids=found.token_ids)).text == text
    assert stub.Detokenize(pb.DetokenizeRequest(token_ids=[72, EOS], skip_special_tokens=True)).text == "H"


def test_an_abort_ends_a_stream_with_what_it_had(pair, stub):
    wait_until_idle(pair, HANG_GUARD_S)
    with pair.client.stream(PROMPT, temperature=0.0, ignore_eos=True, request_id="r-abort") as stream:
        received = [next(stream) for _ in range(3)]
        assert stub.AbortRequest(pb.AbortRequestRequest(request_id="r-abort")).aborted
        received += list(stream)
    last = received[-1]
    assert last.finish_reason == pb.FINISH_REASON_ABORT
    tokens = [token for message in received for token in message.token_ids]
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (len(PROMPT), len(tokens))
    assert len(tokens) < MAX_MODEL_LEN - len(PROMPT)
    check_origins([origin for message in received for origin in message.origins], last.metrics.speculative_decoding)
    assert not stub.AbortRequest(pb.AbortRequestRequest(request_id="r-abort")).aborted
    wait_until_idle(pair, HANG_GUARD_S)


def test_a_request_that_waits_for_the_scheduler_misses_its_deadline_and_is_dropped(pair):
    """More requests than run at once: the last one never gets a step."""
    seqs = pair.config.target.max_num_seqs
    wait_until_idle(pair, HANG_GUARD_S)
    running = [pair.client.stream(PROMPT, temperature=0.0, ignore_eos=True) for _ in range(seqs)]
    try:
        for stream in running:
            next(stream)
        with pytest.raises(OutriderError) as caught:
            pair.client.generate(PROMPT, temperature=0.0, max_tokens=4, timeout_s=0.5)
        assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
        wait_until(lambda: pair.status().target.waiting == 0, HANG_GUARD_S, "the late request is dropped")
    finally:
        for stream in running:
            stream.close()
    wait_until_idle(pair, HANG_GUARD_S)
