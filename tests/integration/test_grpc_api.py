"""Tests the gRPC API on a real pair: where tokens come from, aborts and deadlines."""

import grpc
import pytest

from outrider.deploy.client.sync_client import OutriderError
from outrider.v1 import generation_pb2 as pb
from outrider.v1 import generation_pb2_grpc as rpc
from tests.support.cluster.serving import HANG_GUARD_S, MAX_MODEL_LEN, wait_until, wait_until_idle

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

PROMPT = list(b"The quick brown fox jumps over the lazy dog. " * 3)
ACCEPTED, RECOVERED = pb.TOKEN_ORIGIN_ACCEPTED, pb.TOKEN_ORIGIN_RECOVERED
BONUS, PLAIN = pb.TOKEN_ORIGIN_BONUS, pb.TOKEN_ORIGIN_PLAIN


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


def test_without_drafts_every_token_is_plain(pair):
    answer = pair.client.generate(PROMPT, temperature=0.0, max_tokens=20, speculation=False)
    assert set(answer.completions[0].origins) == {PLAIN}


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
