"""Draws the token after each row of a step, as its request asks. Independent of any engine.

A row's draw depends on its own logits, sampling, seed and positions, never on the rows beside it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.actors.drafter.engine import Draw, Drawn
from outrider.actors.verification.constraints import Constraints, summary_of
from outrider.actors.verification.draft_sampler import sample_drafts
from outrider.actors.verification.search import TokenSubset
from outrider.actors.verification.torch_draws import DraftSample, greedy_choice
from outrider.actors.verification.transfer import in_one_read, to_device
from outrider.cluster.link.messages import DraftSampling
from outrider.cluster.modes import Mode

_MIN_TEMPERATURE, _MAX_TEMPERATURE = 1e-6, 1e6
"""Beyond these, float32 overflows, and the choice is greedy or uniform anyway."""


class _Kind(NamedTuple):
    """Names what rows have in common that are drawn together."""

    mode: Mode
    """GREEDY, COUPLED or REJECTION: block verification takes the same draws as rejection."""

    top_n: int
    biased: bool

    @classmethod
    def of(cls, sampling: DraftSampling) -> _Kind:
        mode, biased = sampling.mode, bool(sampling.biases)
        if mode.samples_q:
            mode = Mode.REJECTION if sampling.top_n else Mode.GREEDY
        return cls(mode, sampling.top_n if mode is Mode.REJECTION else 0, biased)


def draw(logits: Tensor, draws: Sequence[Draw], subset: TokenSubset | None = None) -> list[Drawn]:
    """Draws one token for each row of logits, in order. Waits for the device once.

    logits: [R, V] of any float type, not changed; of R draws, whose biases may name ids from V on. All are given as
    many alternatives as the one that asks for most. subset: the tokens that the columns stand for, if not all; work is
    saved where it is the same object in every step. Raises ValueError when it is of another size than the logits.
    """
    if subset is not None and len(subset.ids) != logits.shape[1]:
        raise ValueError(f"vocab_ids: {len(subset.ids)} tokens for {logits.shape[1]} columns of logits")
    logits = logits.to(torch.float32)
    alternatives = max((one.alternatives for one in draws), default=0)
    places: dict[_Kind, list[int]] = {}
    for place, one in enumerate(draws):
        places.setdefault(_Kind.of(one.sampling), []).append(place)
    samples = []
    for kind, members in places.items():
        rows = logits
        if len(members) < len(draws):
            rows = logits.index_select(0, *to_device([np.array(members)], logits.device))
        samples.append(_sample(kind, rows, [draws[place] for place in members], subset, alternatives))
    if samples and logits.device.type != "cpu":
        samples = _read(samples)
    drawn: dict[int, Drawn] = {}
    for members, sample in zip(places.values(), samples, strict=True):
        drawn.update(zip(members, _rows(*sample), strict=True))
    return [drawn[place] for place in range(len(draws))]


def _sample(
    kind: _Kind, logits: Tensor, draws: Sequence[Draw], subset: TokenSubset | None, alternatives: int
) -> tuple[DraftSample, Tensor | None]:
    """Draws rows of one kind. Returns also which rows, bool [M], have no token that they may draw; None where all have.
    logits: float32 [M, V]."""
    samplings, exhausted = [one.sampling for one in draws], None
    if kind.biased:
        logits, exhausted = _biased(logits, samplings, subset)
    if kind.mode is Mode.GREEDY:
        return greedy_choice(logits, subset, alternatives), exhausted
    limits, known = _limits(samplings, logits.shape[1])
    noise = list(np.array([[d.sampling.seed, d.position, d.round_start] for d in draws]).T.copy())
    there = to_device(noise + limits, logits.device)
    seed, position, round_start, temperature, top_k, top_p, min_p = there
    constraints = Constraints(temperature, top_k, top_p, min_p, *known)
    sample = sample_drafts(
        logits, kind.mode, constraints, seed, position, round_start, kind.top_n, subset, alternatives
    )
    return sample, exhausted


def _limits(
    samplings: Sequence[DraftSampling], vocab_size: int
) -> tuple[list[NDArray[Any]], tuple[int, bool, bool, bool]]:
    """Returns what `Constraints` has of each row, and what the host knows of all."""
    temperature = [min(max(s.temperature, _MIN_TEMPERATURE), _MAX_TEMPERATURE) for s in samplings]
    top_k = np.array([s.top_k if s.top_k < vocab_size else 0 for s in samplings])
    top_p, min_p = (np.array([getattr(s, name) for s in samplings], np.float32) for name in ("top_p", "min_p"))
    return [np.array(temperature, np.float32), top_k, top_p, min_p], summary_of(top_k, top_p, min_p)


def _biased(
    logits: Tensor, samplings: Sequence[DraftSampling], subset: TokenSubset | None
) -> tuple[Tensor, Tensor | None]:
    """A biased copy of logits, float32 [M, V], and rows, bool [M], that have nothing but tokens without a column:
    outside the subset, or beyond the draft model's vocabulary."""
    device, vocab_size = logits.device, logits.shape[1]
    entries = [(i, token) for i, sampling in enumerate(samplings) for token, _ in sampling.biases]
    values = [bias for sampling in samplings for _, bias in sampling.biases]
    only_biased = [i for i, sampling in enumerate(samplings) if sampling.only_biased]
    # Biased tokens that no column stands for share one past the end.
    some_lack = subset is not None or max(token for _, token in entries) >= vocab_size
    places = np.array(entries).T
    row, column, value, only = to_device(
        [places[0], places[1], np.array(values, np.float32), np.array(only_biased, np.int64)], device
    )
    copy = logits.new_empty(len(logits), vocab_size + some_lack)
    copy[:, :vocab_size] = logits
    exhausted = None
    if some_lack:
        copy[:, vocab_size] = 0.0
        column = column.clamp_max(vocab_size) if subset is None else subset.columns_of(column)
        if only_biased:
            allowed = (column < vocab_size) & (value > -math.inf)
            none_left = torch.zeros(len(samplings), dtype=torch.int64, device=device).index_fill_(0, only, 1)
            # Negative or 0 where at least one allowed token is counted off.
            exhausted = none_left.index_add_(0, row, -allowed.to(torch.int64)) > 0
    biased = copy[row, column] + value
    if only_biased:
        copy.index_fill_(0, only, -math.inf)
    copy[row, column] = biased
    return copy[:, :vocab_size], exhausted


def _read(samples: Sequence[tuple[DraftSample, Tensor | None]]) -> list[tuple[DraftSample, Tensor | None]]:
    """Copies samples into the host's memory with one read."""
    kept = [{**vars(sample), "exhausted": exhausted} for sample, exhausted in samples]
    read = iter(in_one_read([tensor for parts in kept for tensor in parts.values() if tensor is not None]))
    found = [{name: None if tensor is None else next(read) for name, tensor in parts.items()} for parts in kept]
    return [(DraftSample(**parts), exhausted) for parts in found for exhausted in [parts.pop("exhausted")]]


def _rows(sample: DraftSample, exhausted: Tensor | None) -> list[Drawn]:
    """Returns the rows of a sample in the host's memory."""
    assert sample.usable is not None
    tokens, usable = sample.ids.tolist(), sample.usable.tolist()
    none_left = [False] * len(tokens) if exhausted is None else exhausted.tolist()
    q_ids = None if sample.q_ids is None else sample.q_ids.to(torch.int32).numpy()
    q_probs = None if sample.q_probs is None else sample.q_probs.numpy()
    others = None if sample.alternatives is None else sample.alternatives.tolist()
    shares = None if sample.confidence is None else sample.confidence.tolist()
    drawn = []
    for i, token in enumerate(tokens):
        if none_left[i] or not usable[i]:
            drawn.append(Drawn(-1, usable=False, bad_logits=not none_left[i]))
            continue
        q = None if q_ids is None else q_ids[i]
        probs = None if q_probs is None else q_probs[i]
        if others is None or shares is None:
            drawn.append(Drawn(token, q, probs))
            continue
        confidence, *rest = shares[i]
        named = tuple((other, share) for other, share in zip(others[i], rest, strict=True) if other >= 0)
        drawn.append(Drawn(token, q, probs, confidence, named))
    return drawn
