"""The rounds of a run, one by one, from the traces of both models. Pure.

A round runs from the start of one target step to the start of the next, on the target's device. Only rounds count in
which all requests of the batch decode, and in the step that follows too: prefill and the tail of a load are left out.

The target works from its beginning on; the drafter's work lies under the target's, or after it, where it is exposed.
What is left is idle: no device works, so a host does, or a message is under way.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from tests.bench.emulation.checkpoint import FIRST_WRITTEN_ID
from tests.bench.emulation.pair import VOCAB_SIZE
from tests.bench.emulation.text_process import Text, TokenRange, ranked_tokens
from tests.bench.emulation.trace import Trace

ORIGINS = ("main", "side", "miss", "none")
"""Where the drafts that a round ended with came from, request by request.

main, side: the drafter had begun to draft after the committed tokens before the target's host had them; main when all
drafts were accepted and its likeliest token came next. miss: it began later, so the target waited. none: no drafts."""

COLUMNS = ("period", "target", "draft", "exposed", "idle", "overhead", "sampling")
"""Seconds. draft: all the drafter's steps that fell into the round; exposed: the part of them that ran while the target
did not; idle: period - target - exposed; overhead: period - max(target, draft), what a round takes beyond perfect
hiding (nothing to go by where drafts are not hidden at all); sampling: of the target's host, from asking for logits to
the read, or to a drafter's launch before it. It runs while the device does."""

ROUND = np.dtype(
    [
        ("step", "i8"),
        ("started_s", "f8"),
        ("tokens", "i8"),
        *((name, "f8") for name in COLUMNS),
        *((name, "i8") for name in ORIGINS),
    ]
)
"""step: the target device's. tokens: committed, of all requests. Then COLUMNS, and requests by ORIGINS."""

_WINDOW = 8
"""Steps back in which a drafter may have begun on a row. Another request may have had the same token there before."""

TOKENS = TokenRange.of(FIRST_WRITTEN_ID, VOCAB_SIZE)


def rounds_of(target: Trace, drafter: Trace, batch: int, text: Text | None = None) -> np.ndarray:
    """ROUND array in order of time. text: what the drafter follows, for origins; None: they are all 0."""
    runs = _Runs(target)
    first, second = runs.full_pairs(batch)
    steps = target.forwards
    rounds = np.zeros(len(first), ROUND)
    if not len(rounds):
        return rounds
    starts, ends, nexts = (
        steps[name][of] for name, of in (("started_s", first), ("ended_s", first), ("started_s", second))
    )
    rounds["step"], rounds["started_s"] = steps["step"][first], starts
    rounds["period"], rounds["target"] = nexts - starts, ends - starts
    rounds["draft"] = _busy_until(drafter, nexts) - _busy_until(drafter, starts)
    rounds["exposed"] = _busy_until(drafter, nexts) - _busy_until(drafter, ends)
    rounds["idle"] = rounds["period"] - rounds["target"] - rounds["exposed"]
    rounds["overhead"] = rounds["period"] - np.maximum(rounds["target"], rounds["draft"])
    launches = np.append(drafter.forwards["called_s"], np.inf)
    next_launch = launches[np.searchsorted(launches, steps["logits_s"][first])]
    rounds["sampling"] = np.minimum(steps["read_s"][first], next_launch) - steps["logits_s"][first]

    before, after = runs.of(first, batch), runs.of(second, batch)
    advanced = after["position"] - before["position"]
    # Requests in another order, or another request in a lane: not the same batch after all.
    same = (after["lane"] == before["lane"]).all(1) & ((advanced > 0) & (advanced <= before["length"])).all(1)
    rounds["tokens"] = advanced.sum(1)
    if text is not None:
        origins = _origins(target, drafter, text, first, before, after)
        for index, name in enumerate(ORIGINS):
            rounds[name] = (origins == index).sum(1)
    return rounds[same]


def count_full(target: Trace, batch: int) -> int:
    """Rounds that `rounds_of` would find, but for those it cannot match."""
    return len(_Runs(target).full_pairs(batch)[0])


@dataclass(frozen=True)
class Spread:
    """Milliseconds."""

    median: float
    p99: float

    @classmethod
    def of(cls, values: np.ndarray, scale: float) -> Spread:
        return cls(float(np.median(values)) * scale, float(np.percentile(values, 99)) * scale)


@dataclass(frozen=True)
class RoundTimes:
    """rounds of a load, and COLUMNS' spreads over them."""

    rounds: int
    tokens: int
    seconds: float
    spreads: dict[str, Spread]
    origins: dict[str, int]
    """Requests' rounds by ORIGINS; all 0 where there is nothing to tell."""

    overhead_by_origin: dict[str, Spread] = field(default_factory=dict)
    """hit: rounds in which every request's drafts were main or side; miss: in which one's were a miss."""

    idle_by_origin: dict[str, Spread] = field(default_factory=dict)
    """Likewise. The rest of an overhead is drafting that the target waited for: on hits, as the drafter chose."""

    @classmethod
    def of(cls, rounds: np.ndarray, scale: float = 1.0) -> RoundTimes:
        """Times are multiplied by scale. Raises ValueError without any rounds."""
        if not len(rounds):
            raise ValueError("rounds: none had the whole batch; ask for more rounds, or longer answers")
        hit, miss = rounds["main"] + rounds["side"] > 0, rounds["miss"] > 0
        groups = {"hit": hit & ~miss & (rounds["none"] == 0), "miss": miss}
        groups = {name: rounds[group] for name, group in groups.items() if group.any()}

        def by_origin(column: str) -> dict[str, Spread]:
            return {name: Spread.of(group[column], 1e3 * scale) for name, group in groups.items()}

        return cls(
            rounds=len(rounds),
            tokens=int(rounds["tokens"].sum()),
            seconds=float(rounds["period"].sum()) * scale,
            spreads={name: Spread.of(rounds[name], 1e3 * scale) for name in COLUMNS},
            origins={name: int(rounds[name].sum()) for name in ORIGINS},
            overhead_by_origin=by_origin("overhead"),
            idle_by_origin=by_origin("idle"),
        )


class _Runs:
    """A target's steps cut into requests: rows of one lane at positions that follow each other.

    Paths of a request's draft tree begin at the same position; its longest one stands for all.
    """

    def __init__(self, target: Trace) -> None:
        rows, forward = target.rows, target.forward_of_row()
        lane = TOKENS.lane(torch.from_numpy(rows["token"].astype(np.int64))).numpy()
        begins = np.ones(len(rows), bool)
        begins[1:] = (np.diff(forward) != 0) | (np.diff(lane) != 0) | (np.diff(rows["position"].astype(np.int64)) != 1)
        start = np.flatnonzero(begins)
        length = np.diff(np.append(start, len(rows)))
        kind = [(name, "i8") for name in ("forward", "lane", "position", "token", "length", "last_token")]
        runs = np.zeros(len(start), kind)
        runs["forward"], runs["lane"], runs["length"] = forward[start], lane[start], length
        runs["position"], runs["token"] = rows["position"][start], rows["token"][start]
        runs["last_token"] = rows["token"][start + length - 1]
        runs = np.sort(runs, order=("forward", "lane", "position", "length"))
        same = [runs[name][1:] == runs[name][:-1] for name in ("forward", "lane", "position")]
        self._runs = runs[~np.append(np.logical_and.reduce(same), False)]
        count = len(target.forwards)
        self._per_forward = np.bincount(self._runs["forward"], minlength=count)
        self._prompt_rows = np.bincount(forward, rows["token"] < FIRST_WRITTEN_ID, minlength=count)
        self._first_run = np.cumsum(self._per_forward) - self._per_forward

    def full_pairs(self, batch: int) -> tuple[np.ndarray, np.ndarray]:
        """Indices of steps and of those that follow them, where both decode for `batch` requests and no prompt."""
        full = (self._per_forward == batch) & (self._prompt_rows == 0)
        first = np.flatnonzero(full[:-1] & full[1:])
        return first, first + 1

    def of(self, forwards: np.ndarray, batch: int) -> np.ndarray:
        """[F, batch], of steps that have so many."""
        return self._runs[self._first_run[forwards][:, None] + np.arange(batch)]


def _origins(
    target: Trace, drafter: Trace, text: Text, first: np.ndarray, before: np.ndarray, after: np.ndarray
) -> np.ndarray:
    """Indices into ORIGINS, [rounds, batch]."""
    known_s = np.broadcast_to(target.forwards["went_on_s"][first][:, None], after.shape)
    since_s = np.broadcast_to(target.forwards["called_s"][np.maximum(first - _WINDOW, 0)][:, None], after.shape)
    launched = drafter.forwards["called_s"]
    bits = max(len(launched), 1).bit_length()
    fed = np.sort((_key(drafter.rows["token"], drafter.rows["position"]) << bits) | drafter.forward_of_row())
    key = _key(after["token"], after["position"])
    # The last step over this row that was launched before the tokens were known.
    place = np.searchsorted(fed, (key << bits) | np.searchsorted(launched, known_s)) - 1
    found = fed[np.maximum(place, 0)] if len(fed) else np.full(key.shape, -1)
    foreseen = (place >= 0) & (found >> bits == key)
    foreseen[foreseen] = launched[found[foreseen] & ((1 << bits) - 1)] >= since_s[foreseen]

    last_position = before["position"] + before["length"] - 1
    rows = (torch.from_numpy(before["last_token"].ravel().copy()), torch.from_numpy(last_position.ravel()))
    guess = ranked_tokens(*rows, TOKENS, text)[:, 0].numpy().reshape(key.shape)
    main = (after["position"] == last_position + 1) & (after["token"] == guess)
    return np.where(after["length"] == 1, 3, np.where(~foreseen, 2, np.where(main, 0, 1)))


def _key(token: np.ndarray, position: np.ndarray) -> np.ndarray:
    return (token.astype(np.int64) << 16) | position.astype(np.int64)


def _busy_until(trace: Trace, times: np.ndarray) -> np.ndarray:
    """Seconds that a device had worked by each time. Its forward passes do not overlap."""
    steps = trace.forwards
    if not len(steps):
        return np.zeros_like(times)
    edges = np.stack([steps["started_s"], steps["ended_s"]], axis=1)
    run = np.zeros_like(edges)
    run[:, 1] = np.cumsum(edges[:, 1] - edges[:, 0])
    run[1:, 0] = run[:-1, 1]
    return np.interp(times, edges.ravel(), run.ravel())
