"""A model drafter serves two links at once, and refuses links that are not for it."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import ray

from outrider.cluster.link import Link, LinkError, host_link
from outrider.cluster.link.codec import pack, unpack
from outrider.cluster.link.messages import (
    Close,
    CloseReason,
    Commit,
    DraftSampling,
    Open,
    PrefetchedProposal,
    ProposalStatus,
)
from outrider.v1 import generation_pb2 as pb
from tests.support.cluster.serving import HANG_GUARD_S, K, wait_until
from tests.support.load.traffic import Traffic
from tests.support.models.tiny_models import VOCAB_SIZE

pytestmark = [pytest.mark.engine, pytest.mark.exhaustive, pytest.mark.timeout(900)]

PROMPT = list(b"The drafter may go at any time. ")
MAX_TOKENS = 300
FOREIGN_EPOCH = 1_000_000


def foreign_link(epoch, **changes):
    """A target's side of a link: the invitation, and what completes it."""
    told = {
        "host": "127.0.0.1",
        "backend": "auto",
        "round_deadline_ms": 1000,
        "link_deadline_ms": 20_000,
        "vocab_size": VOCAB_SIZE,
        "num_speculative_tokens": K,
        "verifier_id": "test",
    }
    return host_link(epoch=epoch, **told | changes)


@pytest.fixture
def second_link(pair):
    """A verifier's end of another link to the pair's live drafter, made in this process."""
    invitation, complete = foreign_link(FOREIGN_EPOCH)
    joining = pair.drafter().accept_link.remote(invitation, HANG_GUARD_S)
    link = Link(
        complete(HANG_GUARD_S),
        epoch=FOREIGN_EPOCH,
        link_deadline_s=20.0,
        decode=lambda payload: unpack(payload, VOCAB_SIZE, K),
        name="test",
    )
    link.start()
    ray.get(joining, timeout=HANG_GUARD_S)
    yield link
    link.close("end of test")


def next_answer(link, ahead):
    """ahead: what is sent meanwhile for outcomes that have not come is added there."""
    while True:
        received = link.poll(HANG_GUARD_S)
        assert received is not None, f"no answer; link: {link.broken}"
        ahead += [message for message in received.messages if isinstance(message, PrefetchedProposal)]
        answers = [message for message in received.messages if not isinstance(message, PrefetchedProposal)]
        if answers:
            (answer,) = answers
            return answer


def follow(link, reference, handle, prompt, rounds):
    """Play a verifier that accepts two drafts a round; every proposal must be the drafter's own greedy text, asked for
    or not."""
    tokens, drafted, ahead = list(prompt), {}, []
    opened = Open(handle, len(tokens), 0, list(tokens), K, DraftSampling())
    link.post(pack([opened]))
    answer = next_answer(link, ahead)
    assert (answer.request, answer.status) == (handle, ProposalStatus.READY)
    committed = [65]
    for number in range(rounds):
        base = len(tokens)
        link.post(pack([Commit(handle, base, committed, K, K)]))
        tokens += committed
        answer = next_answer(link, ahead)
        assert (answer.request, answer.base_committed_len) == (handle, len(tokens))
        assert answer.status is ProposalStatus.OK
        reference.check(tokens, answer.token_ids, label=f"proposal {number}")
        assert len(answer.token_ids) == K
        drafted[len(tokens)] = list(answer.token_ids)
        committed = [*answer.token_ids[:2], 66 + number % 20]
    for each in ahead:
        if each.request == handle and (drafts := drafted.get(each.base_committed_len)) is not None:
            text = [*tokens[: each.base_committed_len], *drafts[: each.position - each.base_committed_len]]
            reference.check([*text, each.next_token], each.token_ids, label=f"ahead of {each.base_committed_len}")


def test_one_drafter_serves_two_links(pair, second_link):
    assert pair.drafter_status()["links"] == 2
    before = pair.status().rounds
    with Traffic(pair, PROMPT, MAX_TOKENS):
        follow(second_link, pair.drafter_reference, 1, b"A prompt of the second target", rounds=12)
        follow(second_link, pair.drafter_reference, 2, b"x" * 300, rounds=4)
        assert second_link.broken is None
    after = pair.status()
    assert after.rounds.drafted_rounds > before.drafted_rounds, "the first link's requests were drafted for meanwhile"
    assert after.link.state == pb.LINK_STATE_UP
    wait_until(lambda: pair.drafter_status()["num_sequences"] == 2, HANG_GUARD_S, "only the second link's are left")
    second_link.post(pack([Close(1, CloseReason.FINISHED)]))
    wait_until(lambda: pair.drafter_status()["num_sequences"] == 1, HANG_GUARD_S, "one of them is closed")
    second_link.close("enough")

    def left():
        status = pair.drafter_status()
        return status["num_sequences"], status["links"], status["kv_cache_usage"]

    wait_until(lambda: left() == (0, 1, 0), HANG_GUARD_S, "a link's sequences go with it")
    assert pair.status().link.epoch == after.link.epoch, "the other link is untouched"


def test_a_drafter_without_the_token_of_the_invitation_gets_no_link(pair):
    invitation, complete = foreign_link(FOREIGN_EPOCH + 1)
    invitation = replace(invitation, token=bytes(32))
    with ThreadPoolExecutor(1) as pool:
        hosted = pool.submit(complete, 20.0)
        with pytest.raises(LinkError, match="test"):
            ray.get(pair.drafter().accept_link.remote(invitation, 20.0), timeout=HANG_GUARD_S)
        with pytest.raises(LinkError):
            hosted.result()
    assert pair.drafter_status()["links"] == 1


def test_a_target_of_another_tokenizer_is_refused_and_told_why(pair):
    invitation, complete = foreign_link(FOREIGN_EPOCH + 2, vocabulary=("another",))
    with pytest.raises(ValueError, match=r"drafter\.model: its tokenizer is not the target's"):
        ray.get(pair.drafter().accept_link.remote(invitation, 20.0), timeout=HANG_GUARD_S)
    del complete
    assert pair.drafter_status()["links"] == 1
