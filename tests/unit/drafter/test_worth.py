"""What a row must bring, and that no hit waits: steps that take their time on a clock of the test's own."""

import pytest

from outrider.actors.drafter.draft_model import DraftModelProposer
from outrider.actors.drafter.outcomes import StepCost
from tests.unit.drafter.draft_bench import KEY, Bench, ids
from tests.unit.drafter.drive import Drive
from tests.unit.drafting_engine import MemoryEngine, drawn_token, lookahead

STEP_S, ROW_S = 6e-3, 30e-6
ROUND_S = 25e-3


class TimedEngine(MemoryEngine):
    """A step takes STEP_S, and ROW_S for each further row."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.now = 0.0
        self.interrupted = None
        """(how far the step is, what happens then), once."""

    def run(self, plan):
        seconds = STEP_S + ROW_S * (len(plan.rows) - 1)
        ends = self.now + seconds
        if self.interrupted is not None:
            (share, then), self.interrupted = self.interrupted, None
            self.now += share * seconds
            then()
        self.now = ends
        return super().run(plan)


class TimedBench(Bench):
    def __init__(self, num_blocks=200, **limits):
        super().__init__()
        self.engine = TimedEngine(num_blocks=num_blocks)
        model = DraftModelProposer(self.engine, self.chunk, lookahead(**limits), clock=lambda: self.engine.now)
        self.proposer = Drive(model)
        self.sent = {}

    def round(self, key, accepted=4, rank=0):
        """Commit so many of the drafts sent and the token of this rank after them. The answer, if it is at hand."""
        drafts, text = self.sent.get(key, []), self.texts[key]
        token = drawn_token(text + drafts[:accepted], rank=rank)
        answer = self.answer(key, [*drafts[:accepted], token], on_miss=1)
        if answer is not None:
            self.heard([answer])
        return answer

    def heard(self, answers):
        for answer in answers or ():
            self.sent[answer.key] = ids(answer)

    def rounds(self, keys, count):
        """Each with all the time that it wants; in some all is accepted."""
        for number in range(count):
            for key in keys:
                accepted = min(number % 7, len(self.sent.get(key, [])))
                self.round(key, accepted, int(accepted < 4))
            self.heard(self.settle())
            self.engine.now += ROUND_S


@pytest.mark.parametrize("share", [0.1, 0.95])
def test_a_hit_is_answered_with_what_is_there_while_a_step_runs(share):
    bench = TimedBench().opened()
    bench.rounds([KEY], 14)
    assert bench.round(KEY) is not None
    for _ in range(3):
        assert not bench.step()
    told = []
    bench.engine.interrupted = share, lambda: told.append(bench.round(KEY))
    bench.step()
    assert ids(told[0]) == bench.drafts(KEY, 2), "the guess of the bonus token, and two drafts"


@pytest.mark.parametrize("true_share", [0.005, 0.03])
def test_what_a_row_costs_is_tried_again_where_all_steps_have_as_many(true_share):
    """Who takes a row for dear adds none, so all steps are alike and say nothing: it must not stay so for ever."""
    cost, most_worth, added = StepCost(), 0.02, []
    for rows, seconds in ((32, 1.0), (64, 10.0)):  # a stall of the machine
        cost.observe(rows, seconds)
    assert cost.row_share > 2 * most_worth
    for _ in range(2000):
        sides = int(min(most_worth / cost.row_share, 4)) if most_worth > cost.row_share else 0
        added.append(sides)
        cost.observe(32 + sides, 1.0 + true_share * sides)
    assert sum(added[:100]) == 0
    if true_share < most_worth:
        assert cost.row_share == pytest.approx(true_share, rel=0.3)
        assert sum(added[-100:]) > 100
    else:
        assert 0 < sum(added[-500:]) < 150, "now and then one"
