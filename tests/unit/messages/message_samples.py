"""Messages of every kind, and a way there and back through the codec."""

import numpy as np

from outrider.cluster.link.messages import (
    MAX_ADAPTERS,
    MAX_BIAS,
    MAX_INT31,
    MAX_NAME_LENGTH,
    MAX_TOP_N,
    Close,
    CloseReason,
    Commit,
    DraftOrigin,
    DraftSampling,
    Open,
    PrefetchedProposal,
    Proposals,
    ProposalStatus,
    SparseQ,
    TrainingSample,
    pack,
    unpack,
)
from outrider.cluster.modes import Mode

VOCAB, K = 1000, 4
INF, NAN = float("inf"), float("nan")


def drawn(**changes):
    values = {
        "mode": Mode.REJECTION,
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.05,
        "seed": 12345678901,
        "top_n": 8,
    }
    return DraftSampling(**(values | changes))


def open_request(**changes):
    values = {
        "request": 3,
        "token_ids": [1, 2, 3, 4, 5],
        "num_speculative_tokens": 4,
        "sampling": drawn(),
    }
    return Open(**(values | changes))


def sparse_q(k=2, n=3):
    probs = np.full((k, n), 1 / n, dtype=np.float32)
    return SparseQ(np.arange(k * n, dtype=np.int32).reshape(k, n), probs)


def lesson(rows=2, width=8, request=3, position=11, first=0):
    ids = np.arange(first, first + rows * width, dtype=np.int32).reshape(rows, width)
    return TrainingSample(request, position, ids, np.log(np.full((rows, width), 0.9 / width)).astype(np.float16))


EVERY_KIND = [
    open_request(),
    open_request(sampling=DraftSampling()),
    open_request(sampling=DraftSampling(tenant=2**63 - 1)),
    open_request(sampling=DraftSampling(adapter=MAX_ADAPTERS)),
    open_request(sampling=drawn(seed=-(2**63)), request=MAX_INT31),
    open_request(sampling=drawn(seed=2**63 - 1, mode=Mode.BLOCK, top_n=MAX_TOP_N)),
    open_request(sampling=drawn(mode=Mode.COUPLED, top_k=MAX_INT31, min_p=1.0)),
    open_request(sampling=drawn(biases=((7, 1.5), (999, -INF), (0, -MAX_BIAS)))),
    open_request(sampling=drawn(mode=Mode.GREEDY, biases=((7, 1.5), (8, -INF)), only_biased=True)),
    open_request(sampling=drawn(top_n=0)),
    open_request(name="0_req-1-0a1b2c3d"),
    open_request(name="n" * MAX_NAME_LENGTH),
    Commit(3, 5, [7], 2, 1),
    Commit(3, 6, [1, 2, 3, 4, 999], 2, 1),
    Commit(3, 6, [1, 2, 3, 4, 999], 2, 1, True),
    PrefetchedProposal(3, 11, 13, 5, [7, 8, 9], DraftOrigin.SIDE_BRANCH, 1400),
    Close(3, CloseReason.FINISHED),
    Close(0, CloseReason.ABORTED),
    Close(1, CloseReason.PREEMPTED),
    Proposals(3, 11, [1, 2, 3, 4]),
    Proposals(3, 11, []),
    *(Proposals(3, 11, [], status) for status in ProposalStatus),
    Proposals(3, 11, [2, 3], q=sparse_q()),
    lesson(),
    lesson(rows=1, width=1),
    lesson(rows=3, width=3, request=MAX_INT31),
]


def repack(messages):
    return unpack(pack(messages), VOCAB, K)


def arrive(messages):
    """Returns whether messages arrive as they were sent, arrays too, which have no equality of their own."""
    return pack(repack(messages)) == pack(messages)
