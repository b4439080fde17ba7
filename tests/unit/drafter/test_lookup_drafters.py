"""Look-ups beside a draft model: whose drafts are sent, that the model goes on from them, and what is learnt."""

import itertools
import random

import pytest

from outrider.actors.drafter.draft_model import DraftModelProposer
from outrider.actors.drafter.lookup_drafters import LookupDrafters
from outrider.actors.drafter.ngram import NgramProposer
from outrider.actors.drafter.suffix import SuffixProposer
from outrider.actors.drafter.suffix_index import SuffixLimits
from outrider.cluster.link.messages import DraftOrigin
from tests.bench.several_drafters import KINDS, MODEL, Play, Texts, Times, earned
from tests.unit.drafter.draft_bench import GREEDY, KEY, SAMPLED, Bench, ids
from tests.unit.drafter.drive import Drive
from tests.unit.drafting_engine import drawn_token


class SeveralBench(Bench):
    def __init__(self, **engine):
        super().__init__(**engine)
        model = self.proposer.proposer
        assert isinstance(model, DraftModelProposer)
        lookups = {
            "ngram": NgramProposer(2, 4),
            "suffix": SuffixProposer(SuffixLimits(24, 1.0, 0.1), 100, 10_000),
        }
        self.several = LookupDrafters(model, lookups, clock=itertools.count().__next__)
        self.proposer = Drive(self.several)
        self.sent_by = []

    def commit(self, key, tokens, *how, **more):
        before = dict(self.several.chosen)
        answers = super().commit(key, tokens, *how, **more)
        self.sent_by.append(next((name for name, n in self.several.chosen.items() if n > before[name]), None))
        return answers


LOOP = [11, 12, 13, 14, 15, 16]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
@pytest.mark.parametrize("seed", range(3))
def test_whoever_drafts_the_model_goes_on_from_the_text(sampling, seed):
    """Targets sometimes say what they said before, and sometimes what the model says. The engine in memory fails
    on a wrong block or position, and what the model sends is always its own continuation."""
    chance = random.Random(seed)
    bench = SeveralBench(max_model_len=2000).opened(LOOP * 4, sampling)
    samples_q = sampling is SAMPLED
    drafts, loops = [], True
    for _ in range(80):
        if chance.random() < 0.15:
            loops = not loops
        accepted = 0
        text = bench.texts[KEY]
        while accepted < len(drafts) and chance.random() < 0.8:
            accepted += 1
        kept = drafts[:accepted]
        model_says = drawn_token([*text, *kept], len(text) if samples_q and accepted < len(drafts) else 0)
        loop_says = LOOP[(LOOP.index(kept[-1] if kept else text[-1]) + 1) % 6] if (kept or text)[-1] in LOOP else 11
        answers = bench.commit(KEY, [*kept, loop_says if loops else model_says])
        while not answers:
            answers = bench.step() or answers
        (answer,) = answers
        drafts = ids(answer)
        if bench.sent_by[-1] in (MODEL, None):  # None: no drafts
            assert drafts == bench.drafts(KEY, len(drafts), samples_q=samples_q)
        else:
            assert answer.q is None
            assert answer.origin is DraftOrigin.MAIN_LINE
        for _ in range(chance.randrange(8)):
            bench.step()
    assert {MODEL, "ngram", "suffix", None} >= set(bench.sent_by)
    assert len({*bench.sent_by} - {None}) > 1


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_the_model_drafts_ahead_from_what_was_looked_up(sampling):
    """So that leaving the loop is answered at once, with the model's drafts."""
    bench = SeveralBench().opened(LOOP * 5, sampling)
    for _ in range(4):
        text = bench.texts[KEY]
        answer = bench.answer(KEY, [LOOP[len(text) % 6]])
        bench.settle()
    assert bench.sent_by[-1] != MODEL
    bonus = drawn_token([*bench.texts[KEY], *ids(answer)])
    left = bench.answer(KEY, [*ids(answer), bonus])
    assert left is not None, "not foreseen"
    assert bench.sent_by[-1] == MODEL
    assert ids(left) == bench.drafts(KEY, samples_q=sampling is SAMPLED)


def test_a_model_that_was_bad_and_is_good_now_drafts_again():
    """Even where a round is hardly longer than a step."""
    play = Play(None, Times(target_s=0.008))
    play.answer(*Texts("hopeless", num_tokens=60).one(), 0.0)
    before = play.rounds
    play.answer(*Texts("easy", num_tokens=500).one(), 1.0)
    assert play.rounds - before < 250


BEST = {"easy": MODEL, "middling": MODEL, "edits": "suffix", "agents": "suffix", "hopeless": MODEL}
"""The best of the single ones, as the bench's table has it."""


@pytest.mark.parametrize("kind", KINDS)
def test_on_each_kind_of_text_it_earns_what_the_best_one_does(kind):
    """Over six answers: with the first it learns which one that is."""
    selected, best = (earned(only, (kind,), 6, Times()).a_second for only in (None, BEST[kind]))
    assert selected > 0.97 * best


def test_the_look_ups_counts_are_reported_beside_the_models():
    play = Play(None, Times())
    play.answer(*Texts("edits").one(), 0.5)
    counted = play.proposer.counters()
    assert counted["chosen"].keys() == {MODEL, "ngram", "suffix"}
    assert counted["chosen"]["suffix"] + counted["chosen"]["ngram"] > 10
    assert counted["suffix_cached_tokens"] > 0
