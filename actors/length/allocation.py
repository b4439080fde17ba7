"""Which lengths give most tokens a second, for one batch and what is known of it. Functions of arrays, no state.

n drafting requests, K positions. A hit of request i with k drafts commits 1 + sum of S_i1..S_ik tokens on average, S_ij
being the probability that its first j drafts are accepted. Every draft costs the target the same, so at any price of a
token the drafts worth their cost are those with S_ij above a threshold: prefixes of all drafts in order of S. Waiting
has a price of its own, paid once a round by the slowest: for hits it depends on the longest k, so every longest k is
tried; a miss makes all the others wait, so which misses are waited for has a threshold of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from actors.length.draft_wait import WaitCurves

_SHORTEST_STEP_S = 1e-6
_PREFIXES = 64
_LONGEST, _MISS_THRESHOLDS = 8, 10
_SMALL_BATCH, _LONGEST_OF_MANY, _MISS_THRESHOLDS_OF_MANY = 8, 2, 5
"""How many are tried of each. The more requests, the less it pays to let all wait for one miss."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What is known of the next round's requests."""

    survival: np.ndarray
    """S [n, K]; 0 beyond what a request may have."""

    hit_rate: np.ndarray
    """[n], above 0 and below 1."""

    delivery: np.ndarray
    """[n] Tokens that come for one asked for."""

    main_share: float
    """Of hits that are on the main line."""

    num_plain: int
    """Requests of the round that draft nothing: they count for the load."""

    step_s: Callable[[np.ndarray], np.ndarray]
    """Seconds of a target step over so many tokens at this number of requests."""

    uniform_saving_s: float
    """What a step costs less when all its requests have 1 + K tokens."""

    waits: WaitCurves

    least_gain: float = 1.0
    """What drafting must promise, as a multiple of the plain rate, to be chosen."""


@dataclass(frozen=True, slots=True)
class Allocation:
    k: np.ndarray
    """[n]"""

    k_miss: np.ndarray
    """[n], 0 to k."""

    rate: float
    """Expected tokens a second."""

    plain_rate: float
    """The same without any drafts."""


def allocate(batch: Batch) -> Allocation:
    """The best lengths found; all 0 where drafting does not promise its least gain."""
    num_requests = len(batch.survival) + batch.num_plain
    plain_rate = num_requests / max(float(batch.step_s(np.array([float(num_requests)]))[0]), _SHORTEST_STEP_S)
    plain = np.zeros(len(batch.survival), dtype=int)
    if not batch.survival.any():
        return Allocation(plain, plain, plain_rate, plain_rate)
    hits, misses = _hit_lengths(batch, num_requests), _miss_lengths(batch)
    # Every longest k with every threshold: [longest, thresholds, n]. A k below k_miss means that hits are not worth
    # their wait but misses are: hits get as much.
    k_miss = np.broadcast_to(misses, (len(hits), *misses.shape))
    k = np.maximum(hits[:, None], k_miss)
    rates = _rates(batch, num_requests, k, k_miss)
    best = np.unravel_index(int(np.argmax(np.where(k.any(axis=2), rates, -np.inf))), rates.shape)
    k, k_miss, rate = k[best], k_miss[best], float(rates[best])
    whole = np.full(len(k), batch.survival.shape[1])
    if batch.uniform_saving_s > 0 and batch.num_plain == 0 and (batch.survival[:, -1] > 0).all():
        uniform = _rates(batch, num_requests, whole[None, None], whole[None, None])[0, 0]
        if uniform > rate:
            k, k_miss, rate = whole, whole, float(uniform)
    if rate <= plain_rate * batch.least_gain:
        return Allocation(plain, plain, plain_rate, plain_rate)
    return Allocation(k, k_miss, rate, plain_rate)


def _hit_lengths(batch: Batch, num_requests: int) -> np.ndarray:
    """[longest, n] For each longest k, the best k of every request if misses are not waited for; of a large batch the
    most promising only."""
    num_drafting, max_tokens = batch.survival.shape
    order = np.argsort(-batch.survival, axis=None, kind="stable")
    order = order[: np.count_nonzero(batch.survival)]
    request, position = np.divmod(order, max_tokens)
    comes = (batch.hit_rate * batch.delivery)[request]
    # [longest k, drafts in order]: prefixes of the drafts at positions up to the longest k.
    longest = np.unique(np.linspace(1, max_tokens, min(_LONGEST, max_tokens)).astype(int))
    within = position < longest[:, None]
    ends = np.unique(np.linspace(0, len(order) - 1, min(_PREFIXES, len(order))).astype(int))
    gains = np.cumsum(within * (comes * batch.survival.ravel()[order]), axis=1)[:, ends]
    tokens = np.cumsum(within * comes, axis=1)[:, ends]
    step_s = batch.step_s(num_requests + tokens)
    some_hit = 1.0 - (1.0 - batch.hit_rate).prod()
    some_main = 1.0 - (1.0 - batch.hit_rate * batch.main_share).prod()
    wait_s = some_hit * batch.waits.hit_s(longest[:, None], some_main / some_hit, step_s)
    rates = (num_requests + gains) / (step_s + wait_s)
    taken = within & (np.arange(len(order)) <= ends[np.argmax(rates, axis=1)][:, None])
    if num_drafting > _SMALL_BATCH:
        taken = taken[np.argsort(-rates.max(axis=1))[:_LONGEST_OF_MANY]]
    return np.array([np.bincount(request[row], minlength=num_drafting) for row in taken])


def _miss_lengths(batch: Batch) -> np.ndarray:
    """[thresholds, n] k_miss if the misses whose drafts survive well enough are waited for; the first: none."""
    levels = np.unique(batch.survival[batch.survival > 0])[::-1]
    most = _MISS_THRESHOLDS if len(batch.survival) <= _SMALL_BATCH else _MISS_THRESHOLDS_OF_MANY
    if len(levels) > most:
        levels = levels[np.linspace(0, len(levels) - 1, most).astype(int)]
    thresholds = np.concatenate(([np.inf], levels))
    return (batch.survival >= thresholds[:, None, None]).sum(axis=2)


def _rates(batch: Batch, num_requests: int, k: np.ndarray, k_miss: np.ndarray) -> np.ndarray:
    """[a, b] Expected tokens a second of a * b choices, k and k_miss [a, b, n]."""
    num_drafting, max_tokens = batch.survival.shape
    sums = np.concatenate((np.zeros((num_drafting, 1)), np.cumsum(batch.survival, axis=1)), axis=1)
    rows = np.arange(num_drafting)
    hit, missed = batch.delivery * batch.hit_rate, batch.delivery * (1.0 - batch.hit_rate)
    gains = sums[rows, k] @ hit + sums[rows, k_miss] @ missed
    step_s = batch.step_s(num_requests + k @ hit + k_miss @ missed)
    if batch.num_plain == 0 and batch.uniform_saving_s > 0:
        # Uniform if all have K drafts, which a shorter answer to a single miss prevents.
        no_short_miss = np.exp((k_miss < max_tokens) @ np.log(batch.hit_rate))
        step_s = step_s - batch.uniform_saving_s * (k == max_tokens).all(axis=2) * no_short_miss
    return (num_requests + gains) / (step_s + _wait_s(batch, k, k_miss, step_s[:, 0]))


def _wait_s(batch: Batch, k: np.ndarray, k_miss: np.ndarray, step_s: np.ndarray) -> np.ndarray:
    """[a, b] Mean wait for the slowest answer, from its distribution function: the product of all requests' own.

    step_s [a] is the target's step that hides drafting. Requests miss independently, each with the mean rate: then all
    with the same (k, k_miss) have the same distribution, and counting them is enough.
    """
    num_lengths = batch.survival.shape[1] + 1
    shape = k.shape[:2]
    pair = (k * num_lengths + k_miss).reshape(-1, k.shape[2]) + num_lengths**2 * np.arange(shape[0] * shape[1])[:, None]
    counts = np.bincount(pair.ravel(), minlength=shape[0] * shape[1] * num_lengths**2).reshape(*shape, -1)
    used = np.flatnonzero(counts.any(axis=(0, 1)))
    used_k, used_miss = np.divmod(used, num_lengths)
    main_s = batch.waits.hit_s(used_k, 1.0, step_s[:, None]) * (used_k > 0)
    side_s = batch.waits.hit_s(used_k, 0.0, step_s[:, None]) * (used_k > 0)
    miss_s = np.broadcast_to(batch.waits.miss_s[used_miss] * (used_k > 0), main_s.shape)
    _, first_k = np.unique(used_k, return_index=True)
    _, first_miss = np.unique(used_miss, return_index=True)
    levels = np.sort(np.concatenate((main_s[:, first_k], side_s[:, first_k], miss_s[:, first_miss]), axis=1), axis=1)
    hit_rate = float(batch.hit_rate.mean()) if len(batch.hit_rate) else 1.0
    below = hit_rate * batch.main_share * (main_s[:, :, None] <= levels[:, None])
    below += hit_rate * (1.0 - batch.main_share) * (side_s[:, :, None] <= levels[:, None])
    below += (1.0 - hit_rate) * (miss_s[:, :, None] <= levels[:, None])
    all_below = np.exp(counts[:, :, used] @ np.log(np.maximum(below, 1e-12)))
    gaps = np.diff(levels, axis=1)
    return levels[:, :1] + ((1.0 - all_below[:, :, :-1]) @ gaps[:, :, None])[:, :, 0]
