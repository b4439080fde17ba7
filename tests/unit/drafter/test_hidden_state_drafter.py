"""Rounds with a drafter in the verifier's process: each commit is answered before the next step asks."""

from __future__ import annotations

import pytest
import torch

from outrider.actors.drafter.engine import Drawn
from outrider.actors.drafter.hidden_state_drafter import HiddenStateDrafter
from outrider.actors.round.length import FixedLengths
from outrider.actors.round.round import Round, Step
from outrider.cluster.config import LinkConfig
from outrider.cluster.link.messages import unpack
from tests.unit.round.scripted_link import DEPLOYMENT, PROMPT, arrival

K = 3


class Heads:
    """Drafts the number of the hidden state's row, so that a test sees which one it was given."""

    num_bytes = 12

    def __init__(self):
        self.calls = []
        self.fails = False

    def warm_up(self, num_drafts, top_n):
        pass

    def draft(self, hidden, token_ids, samplings, positions, counts):
        if self.fails:
            raise RuntimeError("out of memory")
        self.calls.append((token_ids, positions, counts))
        return [[Drawn(int(row))] * count for row, count in zip(hidden[:, 0], counts, strict=True)]


@pytest.fixture
def parts():
    heads = Heads()
    round_ = Round(None, DEPLOYMENT, LinkConfig(), FixedLengths(K))
    drafter = HiddenStateDrafter(lambda: heads, lambda payload: unpack(payload, 20_000, K + 1), round_.offer_link)
    drafter.load()
    drafter.start()
    return round_, drafter, heads


def step(number, names, **events):
    return Step.of(number, dict.fromkeys(names, 1), {}, **events)


def run(round_, drafter, number, committed, rows, **events):
    """Runs one step. Returns the drafts of the next. rows: of each request's last token."""
    this = step(number, committed, **events)
    round_.begin(this)
    handles = {round_.requests[name].handle: row for name, row in rows.items()}
    drafter.keep_hidden(torch.arange(10.0).unsqueeze(1), handles)
    round_.commit(this, committed)
    return round_.take_drafts(this, list(committed))


def test_a_request_has_drafts_from_its_first_token_on_by_its_own_hidden_state(parts):
    round_, drafter, heads = parts
    both = [arrival("a"), arrival("b")]
    assert run(round_, drafter, 1, {"a": [8], "b": [9]}, {"a": 4, "b": 2}, arrived=both) == [[4] * K, [2] * K]
    length = len(PROMPT)
    assert heads.calls == [([8, 9], [length + 1] * 2, [K] * 2)], "one batch, after the last token"
    assert run(round_, drafter, 2, {"b": [5, 6], "a": []}, {"b": 7})[0] == [7] * K, "a sits this step out"
    assert heads.calls[1:] == [([6], [length + 3], [K])]
    assert round_.status()["dropped_proposals"] == 0


def test_a_preempted_request_drafts_again_after_its_next_token(parts):
    round_, drafter, _ = parts
    run(round_, drafter, 1, {"a": [8]}, {"a": 0}, arrived=[arrival("a")])
    round_.begin(step(2, [], preempted=["a"]))
    assert run(round_, drafter, 3, {"a": [9]}, {"a": 6}, resumed=["a"]) == [[6] * K]


def test_an_error_of_the_heads_ends_drafting_and_not_the_engine(parts):
    round_, drafter, heads = parts
    heads.fails = True
    assert run(round_, drafter, 1, {"a": [8]}, {"a": 0}, arrived=[arrival("a")]) == [[]]
    heads.fails = False
    this = step(2, ["a"])
    round_.begin(this)
    round_.commit(this, {"a": [9]})
    assert round_.take_drafts(this, ["a"]) == [[]]
    status = drafter.status()
    assert (status["state"], "out of memory" in status["last_error"]) == ("down", True)
