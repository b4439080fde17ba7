import math

import pytest
import torch

from outrider.actors.verification import coupled
from outrider.actors.verification.coupled import coupled_ranking
from outrider.actors.verification.noise import (
    MAX_BELOW_ZERO,
    MAX_GUMBEL,
    MAX_GUMBEL_ORDINARY,
    Role,
    _rounds,
    gumbel,
    gumbel_from_word,
    philox4x32,
    to_uniform,
    uniform64,
    words,
)

# From the Random123 distribution's known answers for philox4x32, 10 rounds.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def uniform(seed, role, position, index=0, round_start=0):
    return to_uniform(words(seed, role, position, index >> 2, round_start)[index & 3])


def coupled_choice(*args, **options):
    return coupled_ranking(*args, **options)[0].squeeze(1)


def numbers(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_known_answers(counter, key, answer):
    c0, c1, c2, c3 = (torch.tensor([word]) for word in numbers(counter))
    k0, k1 = (torch.tensor([word]) for word in numbers(key))
    assert [int(word) for word in philox4x32((c0, c1, c2, c3), (k0, k1))] == numbers(answer)


def test_uniforms_keep_inside_the_open_interval_and_index_picks_the_word():
    seed, position = torch.tensor([-5]), torch.tensor([3])
    four = words(seed, Role.DRAFT, position, 2, 7)
    for lane, word in enumerate(four):
        assert uniform(seed, Role.DRAFT, position, 8 + lane, 7) == ((word >> 9) + 0.5) * 2.0**-23
    u = uniform(seed, Role.ACCEPT, torch.arange(1_000_000))
    assert u.dtype is torch.float32
    assert 0 < u.min() < 1e-4 < 1 - 1e-4 < u.max() < 1
    assert uniform64(seed, Role.ACCEPT, torch.arange(1000)).min() > 0


def test_streams_are_independent():
    """Uniforms of two streams that differ in one thing only: uncorrelated, and jointly uniform on a 16 x 16 grid."""
    base = {"seed": torch.arange(100_000), "position": torch.tensor([9]), "index": 0, "round_start": 4}
    u = uniform(role=Role.ACCEPT, **base)
    others = [uniform(role=role, **base) for role in Role if role is not Role.ACCEPT]
    others += [
        uniform(role=Role.ACCEPT, **{**base, name: value})
        for name, value in [
            ("seed", base["seed"] + 100_000),
            ("seed", base["seed"] + (1 << 32)),
            ("position", torch.tensor([10])),
            ("index", 1),
            ("index", 4),
            ("round_start", 5),
        ]
    ]
    for other in others:
        grid = torch.bincount((u * 16).long() * 16 + (other * 16).long(), minlength=256).double()
        expected = len(u) / 256
        statistic = ((grid - expected) ** 2 / expected).sum()
        # A false alarm of 1e-6 for each of the ten.
        assert torch.special.gammaincc(torch.tensor(127.5, dtype=torch.float64), statistic / 2) > 1e-6


def test_gumbel_bounds_and_distribution():
    ends = gumbel_from_word(torch.tensor([0, 2**24, 2**32 - 1]))
    assert MAX_GUMBEL - 0.01 < ends[0] < MAX_GUMBEL
    assert MAX_GUMBEL_ORDINARY - 0.01 < ends[1] < MAX_GUMBEL_ORDINARY
    assert -MAX_BELOW_ZERO < ends[2] < -MAX_BELOW_ZERO + 0.02
    g = gumbel(torch.full((200_000,), 77), torch.full((200_000,), 5), torch.arange(200_000)).double()
    assert abs(g.mean() - 0.5772) < 5 * math.pi / math.sqrt(6 * len(g))
    # exp(-exp(-g)) is uniform: Kolmogorov-Smirnov, false alarm 1e-6.
    u = (-(-g).exp()).exp().sort().values
    distance = (u - (torch.arange(len(u)) + 0.5) / len(u)).abs().max()
    assert distance < math.sqrt(math.log(2e6) / 2 / len(u))


@pytest.mark.parametrize("vocab_size", [2, 100, 1000, 5003])
@pytest.mark.parametrize("spread", [0.0, 0.3, 3.0, 30.0])
@pytest.mark.parametrize("temperature", [1.0, 0.3, 2.5])
def test_pruning_never_changes_the_coupled_choice(vocab_size, spread, temperature):
    rows = 20
    logits = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(1)) * spread
    logits[0, 1:] = -torch.inf
    seed, position = torch.arange(rows) - 10, torch.arange(rows)
    row, token = torch.arange(rows).repeat_interleave(vocab_size), torch.arange(vocab_size).repeat(rows)
    t = torch.full((rows,), temperature)
    everything = logits / temperature + gumbel(seed[row], position[row], token).view(rows, vocab_size)
    threshold = logits.sort(dim=-1).values[:, vocab_size // 2]
    masked = everything.masked_fill(logits < threshold.unsqueeze(1), -torch.inf)
    row_max = logits.amax(-1)
    assert torch.equal(coupled_choice(logits, t, None, row_max, seed, position), everything.argmax(-1))
    assert torch.equal(coupled_choice(logits, t, threshold, row_max, seed, position), masked.argmax(-1))
    few = coupled_choice(logits, t, threshold, row_max, seed, position, few_tokens=True)
    assert torch.equal(few, masked.argmax(-1))


def test_coupled_choice_does_not_depend_on_how_rows_are_chunked(monkeypatch):
    logits = torch.randn(7, 1000, generator=torch.Generator().manual_seed(1)) * 3
    more = torch.ones(7), None, logits.amax(-1), torch.arange(7) - 3, torch.arange(7)
    together = coupled_choice(logits, *more)
    monkeypatch.setattr(coupled, "CHUNK_ELEMENTS", 2000)
    assert torch.equal(coupled_choice(logits, *more), together)


def test_words_have_the_same_bits_on_arrays_and_tensors():
    """The CPU's numpy and what runs elsewhere; counter and key each vary in one dimension of their own."""
    shapes = torch.eye(6, dtype=torch.int64) * 2 + 1
    parts = [torch.randint(0, 2**32, shape.tolist(), generator=torch.Generator().manual_seed(2)) for shape in shapes]
    words_of_arrays = philox4x32((parts[0], parts[1], parts[2], parts[3]), (parts[4], parts[5]))
    for found, expected in zip(words_of_arrays, _rounds(*parts), strict=True):
        assert found.shape == (3,) * 6
        assert torch.equal(found, expected)
