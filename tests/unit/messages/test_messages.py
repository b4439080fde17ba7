"""Messages that say something impossible cannot be made."""

import numpy as np
import pytest

from outrider.cluster.link.frame import MAX_INT31
from outrider.cluster.link.messages import (
    MAX_BIASED_TOKENS,
    MAX_NAME_LENGTH,
    MAX_TOP_N,
    Close,
    CloseReason,
    Commit,
    MessageError,
    Name,
    Proposals,
    ProposalStatus,
    SparseQ,
)
from outrider.cluster.modes import Mode
from tests.unit.messages.message_samples import INF, NAN, drawn, open_request, sparse_q


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: open_request(request=-1), "Open.request"),
        (lambda: open_request(request=2**31), "Open.request"),
        (lambda: open_request(token_ids=[]), "Open.token_ids"),
        (lambda: open_request(num_speculative_tokens=-1), "Open.num_speculative_tokens"),
        (lambda: drawn(temperature=NAN), "Open.temperature"),
        (lambda: drawn(temperature=INF), "Open.temperature"),
        (lambda: drawn(temperature=-0.1), "Open.temperature"),
        (lambda: drawn(top_p=0.0), "Open.top_p"),
        (lambda: drawn(top_p=NAN), "Open.top_p"),
        (lambda: drawn(top_k=-1), "Open.top_k"),
        (lambda: drawn(seed=2**63), "Open.seed"),
        (lambda: drawn(mode=1), "Open.mode"),
        (lambda: drawn(mode=Mode.COUPLED, temperature=0.0), "Open.temperature"),
        (lambda: drawn(min_p=NAN), "Open.min_p"),
        (lambda: drawn(min_p=1.1), "Open.min_p"),
        (lambda: drawn(top_n=-1), "Open.top_n"),
        (lambda: drawn(top_n=MAX_TOP_N + 1), "Open.top_n"),
        (lambda: drawn(biases=tuple((i, 0.0) for i in range(MAX_BIASED_TOKENS + 1))), "Open.biases"),
        (lambda: drawn(biases=((1, 0.0), (1, 1.0))), "Open.biases"),
        (lambda: drawn(biases=((-1, 0.0),)), "Open.biases"),
        (lambda: drawn(biases=((1, NAN),)), "Open.biases"),
        (lambda: drawn(biases=((1, INF),)), "Open.biases"),
        (lambda: drawn(biases=((1, 1e39),)), "Open.biases"),
        (lambda: drawn(biases=((1, -1e39),)), "Open.biases"),
        (lambda: drawn(only_biased=True), "Open.only_biased"),
        (lambda: drawn(biases=((1, -INF),), only_biased=True), "Open.only_biased"),
        (lambda: Commit(-1, 1, [1], 2, 1), "Commit.request"),
        (lambda: Commit(1, -1, [1], 2, 1), "Commit.base_committed_len"),
        (lambda: Commit(1, MAX_INT31, [1], 2, 1), "Commit.base_committed_len"),
        (lambda: Commit(1, 1, [], 2, 1), "Commit.token_ids"),
        (lambda: Close(-1, CloseReason.FINISHED), "Close.request"),
        (lambda: Proposals(-1, 1, []), "Proposals.request"),
        (lambda: Proposals(1, -1, []), "Proposals.base_committed_len"),
        (lambda: Proposals(1, 1, [1], ProposalStatus.NOT_READY), "Proposals.token_ids"),
        (lambda: Proposals(1, 1, [2], q=sparse_q()), "Proposals.q_ids"),
        (lambda: Proposals(1, 1, [2, 999], q=sparse_q()), "Proposals.q_probs"),
    ],
)
def test_a_wrong_message_cannot_be_made(make, field):
    with pytest.raises(MessageError) as caught:
        make()
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("ids", "probs", "field"),
    [
        ([[1, 2]], [[0.5, 0.4]], "Proposals.q_probs"),
        ([[1, 2]], [[0.6, 0.402]], "Proposals.q_probs"),
        ([[1, 2]], [[1.1, -0.1]], "Proposals.q_probs"),
        ([[1, 2]], [[float("nan"), 1.0]], "Proposals.q_probs"),
        ([[1, 2]], [[float("inf"), 0.0]], "Proposals.q_probs"),
        ([[1, 2], [3, 4]], [[0.5, 0.5], [0.5, 0.6]], "Proposals.q_probs"),
        ([[1, 2]], [[1.0]], "Proposals.q_probs"),
        ([[7, 7]], [[0.5, 0.5]], "Proposals.q_ids"),
        ([[1, 2], [8, 8]], [[0.5, 0.5], [1.0, 0.0]], "Proposals.q_ids"),
        ([[-1, 2]], [[0.5, 0.5]], "Proposals.q_ids"),
        ([[]], [[]], "Proposals.q_ids"),
    ],
)
def test_a_wrong_q_cannot_be_made(ids, probs, field):
    with pytest.raises(MessageError) as caught:
        SparseQ(np.array(ids, dtype=np.int32), np.array(probs, dtype=np.float32))
    assert caught.value.field == field


def test_q_within_the_tolerance_is_taken():
    SparseQ(np.array([[1, 2]], np.int32), np.array([[0.5, 0.5009]], np.float32))


@pytest.mark.parametrize("name", ["", "n" * (MAX_NAME_LENGTH + 1), "two\nlines", "ü"])
def test_a_name_that_cannot_be_sent(name):
    with pytest.raises(MessageError, match=r"Name\.request_id"):
        Name(1, name)
