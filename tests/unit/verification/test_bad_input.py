"""A bad proposal costs its request speculation; bad logits cost the request its step; neither gives a wrong token."""

import math

import pytest
import torch

from outrider.actors.verification.batch import Sampling, Status, VerificationBatch
from outrider.actors.verification.torch_kernel import verify
from outrider.cluster.modes import Mode
from tests.unit.verification.arrays import build, sampling_of, uniform

V, K, N = 50, 3, 4
SAMPLED = [Mode.REJECTION, Mode.BLOCK]


def batch_of(mode: Mode, requests: int = 3, **change) -> VerificationBatch:
    """All drafts are token 0, which target and drafter hold for nearly certain: all are accepted."""
    logits = torch.randn(requests * (K + 1), V, generator=torch.Generator().manual_seed(1))
    logits[:, 0] = 30.0
    parts = {
        "logits": logits,
        "num_drafts": torch.full((requests,), K),
        "draft_ids": torch.zeros(requests * K, dtype=torch.int64),
        "sampling": uniform(mode, torch.arange(requests), torch.full((requests,), 9)),
        "q_ids": torch.arange(N).repeat(requests * K, 1),
        "q_probs": torch.tensor([[0.97, 0.01, 0.01, 0.01]]).repeat(requests * K, 1),
    }
    for name, edit in change.items():
        edit(parts[name])
    return build(**parts)


def accepted(result) -> list[int]:
    """How many tokens of each request are drafts: all but the last."""
    return (result.token_ids[:, 1:] >= 0).sum(-1).tolist()


def put(index, value):
    def edit(tensor):
        tensor[index] = value

    return edit


BAD_IDS = [-1, V, 2**31 - 1, -(2**63)]


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("bad", BAD_IDS)
def test_draft_out_of_range(mode, bad):
    result = verify(batch_of(mode, draft_ids=put(K + 1, bad)))
    assert accepted(result) == [K, 1, K]
    assert result.status.tolist() == [Status.OK, Status.BAD_PROPOSAL, Status.OK]
    # As if the request had one draft only.
    assert result.token_ids.tolist() == [[0] * 4, [0, 0, -1, -1], [0] * 4]


@pytest.mark.parametrize("mode", SAMPLED)
@pytest.mark.parametrize(
    "change",
    [
        {"q_ids": put((K + 1, 2), -3)},
        {"q_ids": put((K + 1, 2), V)},
        {"q_ids": put((K + 1, 2), 1)},
        {"q_ids": put((K + 1, 2), 0)},
        {"q_probs": put((K + 1, 2), math.nan)},
        {"q_probs": put((K + 1, 2), math.inf)},
        {"q_probs": put((K + 1, 2), -0.01)},
        {"q_probs": put((K + 1, 2), 0.02)},
        {"q_probs": put(K + 1, torch.tensor([0.0, 0.5, 0.25, 0.25]))},
        {"q_ids": put(K + 1, torch.tensor([5, 6, 7, 8]))},
    ],
    ids=["negative", "too-large", "twice", "draft-twice", "nan", "inf", "below-0", "sum", "draft-at-0", "draft-absent"],
)
def test_q_that_cannot_have_been_sampled_from(mode, change):
    result = verify(batch_of(mode, **change))
    assert accepted(result) == [K, 1, K]
    assert result.status.tolist() == [Status.OK, Status.BAD_PROPOSAL, Status.OK]
    assert result.token_ids[1].tolist() == [0, 0, -1, -1]


@pytest.mark.parametrize("mode", [Mode.GREEDY, Mode.COUPLED])
def test_q_is_not_looked_at_without_rejection(mode):
    result = verify(batch_of(mode, q_probs=put(slice(None), math.nan)))
    assert accepted(result) == [K] * 3
    assert result.status.tolist() == [Status.OK] * 3


def test_sum_of_q_within_tolerance_is_fine():
    result = verify(batch_of(Mode.REJECTION, q_probs=put((slice(None), 1), 0.0105)))
    assert result.status.tolist() == [Status.OK] * 3


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("bad", [math.nan, math.inf, None], ids=["nan", "inf", "all-masked"])
def test_bad_logits_that_are_reached(mode, bad):
    row = (K + 1) + 2
    edit = put(row, -math.inf) if bad is None else put((row, 7), bad)
    result = verify(batch_of(mode, logits=edit))
    assert result.status.tolist() == [Status.OK, Status.BAD_LOGITS, Status.OK]
    assert accepted(result) == [K, 0, K]
    assert result.token_ids.tolist() == [[0] * 4, [-1] * 4, [0] * 4]


@pytest.mark.parametrize("mode", Mode)
def test_bad_logits_behind_a_rejection_do_not_matter(mode):
    """Without speculation nobody would have come there."""

    def edit(logits):
        logits[K + 1, 0], logits[K + 1, 3] = -30.0, 30.0
        logits[K + 3] = math.nan

    result = verify(batch_of(mode, logits=edit))
    assert result.status.tolist() == [Status.OK] * 3
    assert result.token_ids.tolist() == [[0] * 4, [3, -1, -1, -1], [0] * 4]


@pytest.mark.parametrize("mode", Mode)
def test_masked_tokens_are_never_committed(mode):
    """Single -inf logits are ordinary masks; drafts there are rejected."""
    result = verify(batch_of(mode, logits=put((slice(None), slice(0, 49)), -math.inf)))
    assert result.status.tolist() == [Status.OK] * 3
    assert result.token_ids.tolist() == [[49, -1, -1, -1]] * 3


@pytest.mark.parametrize("mode", Mode)
def test_no_drafts_at_all(mode):
    logits = torch.zeros(2, V)
    logits[0, 4], logits[1, 6] = 60.0, 60.0
    sampling = uniform(mode, torch.arange(2), torch.tensor([0, 1]))
    result = verify(build(logits, torch.zeros(2), torch.zeros(0, dtype=torch.int64), sampling))
    assert result.token_ids.tolist() == [[4], [6]]
    assert accepted(result) == [0, 0]


def test_modes_mix_and_requests_do_not_touch_each_other():
    generator = torch.Generator().manual_seed(3)
    modes = torch.tensor([1, 0, 3, 2, 2, 3, 1, 0])
    num_drafts = torch.tensor([2, 3, 0, 3, 1, 3, 0, 2])
    drafts, rows = int(num_drafts.sum()), int(num_drafts.sum()) + 8
    logits = torch.randn(rows, 3000, generator=generator) * 4
    draft_ids = logits.argmax(-1)[torch.arange(rows).repeat(1)][:drafts]
    q_ids = (draft_ids.unsqueeze(1) + torch.arange(N)) % 3000
    q_probs = torch.tensor([[0.7, 0.1, 0.1, 0.1]]).repeat(drafts, 1)
    sampling = sampling_of(
        mode=modes,
        temperature=torch.linspace(0.5, 1.2, 8),
        top_k=torch.tensor([0, 5, 0, 20, 0, 0, 0, 0]),
        top_p=torch.tensor([1.0, 1.0, 0.9, 1.0, 1.0, 0.8, 1.0, 1.0]),
        min_p=torch.zeros(8),
        seed=torch.arange(8) * 10**12,
        position=torch.arange(8),
    )
    together = verify(build(logits, num_drafts, draft_ids, sampling, q_ids, q_probs))
    row = draft = 0
    for i, k in enumerate(num_drafts.tolist()):
        one = Sampling(**{name: value[i : i + 1] for name, value in vars(sampling).items()})
        d = slice(draft, draft + k)
        alone = verify(
            build(
                logits[row : row + k + 1],
                num_drafts[i : i + 1],
                draft_ids[d],
                one,
                q_ids[d],
                q_probs[d],
            )
        )
        assert alone.token_ids[0].tolist() == together.token_ids[i, : k + 1].tolist()
        assert (together.token_ids[i, k + 1 :] == -1).all()
        row, draft = row + k + 1, draft + k
