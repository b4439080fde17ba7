"""When the drafter pauses rather than begin a step that would still run when a target asks."""

from types import SimpleNamespace

import pytest

from outrider.actors.drafter import pause as pause_module
from outrider.actors.drafter.pause import Pauses
from outrider.cluster.link.messages import Commit
from tests.bench.emulation.profiles import PROFILES, TEXTS
from tests.bench.pool_curve import simulate
from tests.unit.drafter.draft_bench import KEY
from tests.unit.drafter.test_worth import TimedBench

LINK, OTHER_LINK = 1, 2
STEP_S, ROUND_S = 6e-3, 25e-3


class Rig:
    def __init__(self, links=(LINK,), verify_s=ROUND_S, missed=True, worth=0.5, pace=110.0):
        self.now = 0.0
        self.pauses = Pauses(lambda: self.now)
        self.sequences = [SimpleNamespace(key=(link, 0), tokens_per_s=pace) for link in links]
        self.pauses.stepped(worth)
        for _ in range(20):
            for link in links:
                self.pauses.asked(link)
                self.pauses.looked(link, missed)
                self.pauses.answered(link)
            self.now += verify_s

    def before(self, left_s):
        """What is next so long before somebody is expected to ask."""
        self.now = min(at for rounds in self.pauses._links.values() if (at := rounds.asks_at) is not None) - left_s
        return self.next()

    def next(self):
        return self.pauses.next(STEP_S, self.sequences)


@pytest.mark.parametrize(("left", "pauses"), [(1.5, False), (0.95, False), (0.3, True), (0.02, True)])
def test_a_step_that_would_end_late_after_the_target_asks_is_not_begun(left, pauses):
    rig = Rig()
    pause = rig.before(left * STEP_S)
    assert (pause is not None) is pauses
    if pauses:
        assert rig.now + left * STEP_S < pause.until < rig.now + (left + 0.2) * STEP_S


def test_it_is_over_when_the_target_asks():
    rig = Rig()
    pause = rig.before(0.3 * STEP_S)
    assert not pause.over.is_set()
    rig.pauses.asked(LINK)
    assert pause.over.is_set()
    pause.execute()  # at once, though the clock stands still


def test_who_does_not_ask_when_expected_is_waited_for_once():
    rig = Rig()
    pause = rig.before(0.3 * STEP_S)
    rig.now = pause.until
    rig.pauses.complete(pause)
    assert rig.next() is None
    rig.pauses.asked(LINK)
    rig.pauses.answered(LINK)
    assert rig.before(0.3 * STEP_S) is not None, "with the next answer it begins anew"


def test_a_target_that_has_nothing_to_ask_for_keeps_nobody_from_pausing_for_another():
    rig = Rig(links=(LINK, OTHER_LINK))
    for _ in range(3):
        rig.pauses.asked(OTHER_LINK)
        rig.pauses.answered(OTHER_LINK)
        rig.now += ROUND_S
    rig.now -= 0.3 * STEP_S
    assert rig.next().link_id == OTHER_LINK


def test_where_rounds_are_unlike_one_another_nobody_waits():
    rig = Rig()
    for number in range(20):
        rig.pauses.asked(LINK)
        rig.pauses.answered(LINK)
        rig.now += ROUND_S * (1 + number % 2)
    rig.pauses.asked(LINK)
    rig.pauses.answered(LINK)
    assert rig.before(0.3 * STEP_S) is None


@pytest.mark.parametrize("rig", [{"missed": False}, {"worth": 20.0}, {"pace": 1.0}], ids=["hits", "worth", "slow"])
def test_nor_where_a_step_brings_more_than_the_target_loses(rig):
    assert Rig(**rig).before(0.3 * STEP_S) is None


def test_of_a_link_that_is_gone_nothing_is_expected():
    rig = Rig(links=(LINK, OTHER_LINK))
    pause = rig.before(0.3 * STEP_S)
    rig.pauses.unlink(pause.link_id)
    assert pause.over.is_set()
    rig.pauses.complete(pause)
    assert rig.next().link_id != pause.link_id
    rig.pauses.unlink(LINK)
    rig.pauses.unlink(OTHER_LINK)
    assert rig.next() is None


def test_one_target_s_rounds_bring_more_by_it(monkeypatch):
    """On a clock of the simulation's own: rounds of 25 ms and steps of 6."""

    def tokens_a_round():
        return simulate(PROFILES["70b-8b"], TEXTS["stated"], num_targets=1, batch=1, k=4, rounds=400)[1]

    with_pauses = tokens_a_round()
    monkeypatch.setattr(pause_module, "_PRICE", 0.0)
    assert with_pauses > 1.01 * tokens_a_round()


def test_a_round_that_somebody_else_s_drafts_answer_says_nothing_of_how_long_a_target_verifies():
    """Else two rounds would count as one, and as rounds unlike one another."""
    bench = TimedBench().opened()
    bench.rounds([KEY], 14)
    rounds = bench.proposer._pauses._links[KEY[0]]
    before = rounds.verify_s.value
    sequence, text = bench.proposer.sequences[KEY], bench.texts[KEY]
    for _ in range(2):
        commit = Commit(KEY[1], len(text), [7], 4, 4)
        text.append(7)
        assert bench.proposer.proposer.commit(sequence, commit, instead=lambda: [1, 2])
        assert rounds.answered_at is None
        bench.engine.now += 10.0
    assert rounds.verify_s.value < 2 * before
