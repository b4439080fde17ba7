"""Messages that say something impossible cannot be made, or are refused where they are received."""

import numpy as np
import pytest

from outrider.cluster.link.messages import (
    MAX_ADAPTERS,
    MAX_BIASED_TOKENS,
    MAX_INT31,
    MAX_NAME_LENGTH,
    MAX_TOP_N,
    Close,
    CloseReason,
    Commit,
    DraftOrigin,
    DraftPath,
    MessageError,
    PrefetchedProposal,
    Proposals,
    ProposalStatus,
    SparseQ,
)
from outrider.cluster.modes import MAX_PATHS, Mode
from tests.unit.messages.message_samples import INF, NAN, drawn, open_request, repack, sparse_q


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: drawn(temperature=NAN), "Open.temperature"),
        (lambda: drawn(temperature=INF), "Open.temperature"),
        (lambda: drawn(temperature=-0.1), "Open.temperature"),
        (lambda: drawn(mode=Mode.COUPLED, temperature=0.0), "Open.temperature"),
        (lambda: drawn(biases=tuple((i, 0.0) for i in range(MAX_BIASED_TOKENS + 1))), "Open.biases"),
        (lambda: drawn(biases=((1, 0.0), (1, 1.0))), "Open.biases"),
        (lambda: drawn(biases=((-1, 0.0),)), "Open.biases"),
        (lambda: drawn(biases=((1, NAN),)), "Open.biases"),
        (lambda: drawn(biases=((1, INF),)), "Open.biases"),
        (lambda: drawn(biases=((1, 1e39),)), "Open.biases"),
        (lambda: drawn(biases=((1, -1e39),)), "Open.biases"),
        (lambda: drawn(only_biased=True), "Open.only_biased"),
        (lambda: drawn(biases=((1, -INF),), only_biased=True), "Open.only_biased"),
        (lambda: Commit(1, 1, [5], 2, 3), "Commit.num_on_miss"),
        (lambda: Commit(1, 1, [5], 0, 0, True), "Commit.has_drafts"),
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


@pytest.mark.parametrize(
    "message",
    [
        open_request(request=-1),
        open_request(request=2**31),
        open_request(token_ids=[]),
        open_request(num_speculative_tokens=-1),
        *(
            open_request(sampling=drawn(**{field: value}))
            for field, values in {
                "mode": (4,),
                "top_k": (-1, 2**31),
                "top_p": (0.0, 1.1, NAN),
                "min_p": (-0.1, 1.1, NAN),
                "seed": (2**63,),
                "top_n": (-1, MAX_TOP_N + 1),
                "tenant": (-1, 2**63),
                "adapter": (-1, MAX_ADAPTERS + 1),
            }.items()
            for value in values
        ),
        Commit(-1, 1, [1], 2, 1),
        Commit(1, -1, [1], 2, 1),
        Commit(1, MAX_INT31 + 1, [1], 2, 1),
        Commit(1, 1, [], 2, 1),
        Commit(1, 1, [3, -1, 3], 2, 1),
        Commit(1, 1, [1], 2, 1, num_paths=0),
        Commit(1, 1, [1], 2, 1, num_paths=MAX_PATHS + 1),
        Close(-1, CloseReason.FINISHED),
        Proposals(-1, 1, []),
        Proposals(1, -1, []),
        Proposals(1, 1, [-1]),
        Proposals(1, 1, [], step_us=-1),
        Proposals(1, 1, [1], paths=(DraftPath([], 0.0),)),
        Proposals(1, 1, [1], paths=(DraftPath([1], 0.5),) * MAX_PATHS),
        PrefetchedProposal(1, 2, 3, 4, [], DraftOrigin.MISS),
        PrefetchedProposal(1, 2, 3, -4, [5], DraftOrigin.MISS),
        *(open_request(name=name) for name in ("n" * (MAX_NAME_LENGTH + 1), "two\nlines", "line\n", "ü")),
    ],
    ids=repr,
)
def test_a_field_out_of_its_range_is_refused_on_receipt(message):
    with pytest.raises(MessageError, match=r"^payload: Expected|^payload: Invalid|^payload: Integer"):
        repack([message])
