"""Two draft models in one drafter: who leads a request, that what is sent is that one's, and that the others follow."""

import itertools
import random
from collections import Counter, defaultdict
from dataclasses import replace

import numpy as np
import pytest

from outrider.actors.drafter.draft_model import DraftModelStrategy
from outrider.actors.drafter.judge import MODEL
from outrider.actors.drafter.load import warm_up
from outrider.actors.drafter.loop import DraftLoop
from outrider.actors.drafter.ngram import NgramStrategy
from outrider.actors.drafter.planner import LookaheadLimits
from outrider.actors.drafter.several import SeveralStrategy
from outrider.cluster.link.messages import Close, CloseReason, Commit, DraftSampling, ProposalStatus
from outrider.cluster.modes import Mode
from tests.bench.several_drafters import SMALL, Play, Texts, Times
from tests.unit.drafter.draft_bench import GREEDY, KEY, SAMPLED, Bench
from tests.unit.drafter.drive import Drive, prompt_of
from tests.unit.drafter.scripted_strategy import Sink
from tests.unit.drafting_engine import VOCAB, MemoryEngine, drawn_token

COUPLED = DraftSampling(Mode.COUPLED, temperature=1.0, seed=3)
K = 4
SALTS = {MODEL: 0, SMALL: 7}


class SaltedEngine(MemoryEngine):
    """Says another token than every other model does, and what it drew it from."""

    def __init__(self, name, **engine):
        super().__init__(**engine)
        self._salt = SALTS[name]

    def _drawn(self, row, draw, end):
        drawn = super()._drawn(row, draw, end)
        if not drawn.usable:
            return drawn
        token = (drawn.token + self._salt) % VOCAB
        others = tuple(((other + self._salt) % VOCAB, chance) for other, chance in drawn.alternatives)
        if not draw.sampling.mode.samples_q:
            return replace(drawn, token=token, alternatives=others)
        q = np.array([token, VOCAB + end], np.int32), np.array([0.75, 0.25], np.float32)
        return replace(drawn, token=token, alternatives=others, q_ids=q[0], q_probs=q[1])


def said_by(name, text, count, samples_q):
    """The model's drafts for the round that starts after `text`."""
    said = list(text)
    for _ in range(count):
        said.append((drawn_token(said, len(text) if samples_q else 0) + SALTS[name]) % VOCAB)
    return said[len(text) :]


class TwoBench(Bench):
    """Both models over engines in memory, and targets that commit what they like."""

    def __init__(self, lookups=None, chunk=16, limits=None, **engines):
        """engines: of each model by its name what its engine has of its own."""
        clock = itertools.count().__next__
        self.engines = {name: SaltedEngine(name, **engines.get(name, {})) for name in SALTS}
        models = {name: DraftModelStrategy(engine, chunk, limits, clock=clock) for name, engine in self.engines.items()}
        self.several = SeveralStrategy(models[MODEL], lookups or {}, clock, {SMALL: models[SMALL]})
        self.strategy = Drive(self.several)
        self.texts, self.sampling = {}, {}
        self.ahead = {}
        """Drafts that were sent before anybody asked, by what they are for."""

    def open(self, key, tokens, sampling=GREEDY, k=K):
        self.sampling[key] = sampling
        self.ahead = {of: drafts for of, drafts in self.ahead.items() if of[0] != key}
        return super().open(key, tokens, sampling, k)

    def commit(self, key, tokens, k=K, on_miss=2, has_drafts=False):
        return super().commit(key, tokens, k, min(k, on_miss), has_drafts)

    def take(self, key, tokens):
        """Commits what drafts have been sent for, and returns them; None: there are none, and nothing is done."""
        base = len(self.texts[key])
        drafts = self.ahead.get((key, base, base + len(tokens) - 1, tokens[-1]))
        if drafts is not None:
            assert self.commit(key, tokens, has_drafts=True) == []
        return drafts

    def beside(self, key=KEY):
        return self.several._beside[self.strategy.sequences[key]]

    def step(self):
        answers = super().step()
        for sequence, ahead in self.several.foreseen():
            self.ahead[sequence.key, ahead.base_committed_len, ahead.position, ahead.next_token] = ahead.token_ids
        return answers

    def answer(self, key, tokens, k=K):
        """The one answer to a commit."""
        answers = self.commit(key, tokens, k)
        while not answers:
            answers = self.step()
        (answer,) = answers
        return answer

    def led_by(self, name):
        """From now on it leads where it can, and is waited for."""
        self.several.judge.choose = lambda record, offers: max(offers, key=lambda offer: offer.num_drafts)
        self.lead_by(lambda able: name if name in able else min(able))

    def lead_by(self, choose):
        def lead(record, able, *_):
            record.leader = choose(able)
            return record.leader

        self.several.judge.lead = lead

    def check(self, answer):
        """What was sent is what the model that leads says of the text, with that model's q."""
        key, text = answer.key, self.texts[answer.key]
        samples_q = self.sampling[key].mode.samples_q
        assert answer.token_ids == said_by(self.beside(key).leader, text, len(answer.token_ids), samples_q)
        if samples_q and answer.token_ids:
            assert answer.q.ids[:, 0].tolist() == answer.token_ids
            assert answer.q.ids[:, 1].tolist() == [VOCAB + len(text) + index for index in range(len(answer.token_ids))]
        else:
            assert answer.q is None


def opened(sampling=GREEDY, led_by=None, **bench):
    """One request, which both models have read. led_by: who is to draft for it."""
    made = TwoBench(**bench).opened(range(20), sampling)
    if led_by is not None:
        made.led_by(led_by)
    return made


@pytest.mark.parametrize("few", [{}, {MODEL: {"num_blocks": 60}}, {SMALL: {"num_blocks": 60}}])
@pytest.mark.parametrize("seed", range(4))
def test_what_is_sent_is_the_leaders_own_whoever_leads(few, seed):
    """Over requests of two links that come and go, leaders by chance, commits that overtake others, and a KV cache that
    is too small. The engines in memory fail on KV in a block that nobody holds."""
    chance = random.Random(seed)
    bench = TwoBench(**{name: {"max_model_len": 220, **few.get(name, {})} for name in SALTS})
    bench.led_by(MODEL)
    bench.lead_by(lambda able: chance.choice(list(able)))
    drafts, waiting, ready, statuses = {}, set(), Counter(), Counter()
    num_taken = 0

    def hear(answers):
        for answer in answers or ():
            statuses[answer.status] += 1
            if answer.status is ProposalStatus.READY:
                ready[answer.key] += 1
                assert ready[answer.key] == 1
                continue
            if answer.status is ProposalStatus.NOT_READY:
                ready[answer.key] = 0
                continue
            if answer.base_committed_len < len(bench.texts[answer.key]):
                assert answer.token_ids == [], "overtaken"
                continue
            assert answer.key in waiting, "answered twice"
            waiting.remove(answer.key)
            if answer.status is ProposalStatus.OK:
                bench.check(answer)
                drafts[answer.key] = answer.token_ids

    for _ in range(700):
        key = chance.choice([(1, 1), (1, 2), (2, 1), (2, 2)])
        what = chance.random()
        if key not in bench.texts or what < 0.01:
            waiting.discard(key)
            ready[key] = 0
            drafts.pop(key, None)
            sampling = chance.choice([GREEDY, SAMPLED, COUPLED])
            answer = bench.open(key, [chance.randrange(VOCAB) for _ in range(chance.choice([3, 40]))], sampling)
            hear([answer] if answer else [])
        elif what < 0.3 and (key not in waiting or chance.random() < 0.2):
            text, sent = bench.texts[key], drafts.pop(key, [])
            if len(text) > 200:
                bench.strategy.close(key)
                del bench.texts[key]
                waiting.discard(key)
                continue
            kept = sent[: chance.randrange(len(sent) + 1)]
            samples_q = bench.sampling[key].mode.samples_q
            at = len(text) + len(kept) + 1
            start = 0 if not samples_q or len(kept) == len(sent) else len(text)
            following = (drawn_token([*text, *kept], start) + chance.choice([*SALTS.values(), at])) % VOCAB
            foreseen = [place for place in bench.ahead if place[:2] == (key, len(text))]
            if foreseen and chance.random() < 0.3:
                _, base, position, following = chance.choice(foreseen)
                kept = sent[: position - base]
            k = chance.choice([K, K, K, 0])
            if key not in waiting and (taken := bench.take(key, [*kept, following])) is not None:
                assert taken == said_by(bench.beside(key).leader, bench.texts[key], K, samples_q)
                drafts[key] = taken
                num_taken += 1
                continue
            waiting.discard(key)
            if k:
                waiting.add(key)
            hear(bench.commit(key, [*kept, following], k))
        else:
            hear(bench.step())
    hear(bench.settle())
    assert not waiting, "a commit without an answer"
    assert statuses[ProposalStatus.OK] > 100
    assert num_taken > 10
    assert all(len(engine.plans) > 50 for engine in bench.engines.values())
    for key in list(bench.strategy.sequences):
        bench.strategy.close(key)
    assert bench.settle() == []
    for engine in bench.engines.values():
        assert sorted(engine.free) == list(range(engine.num_blocks))
        assert not engine.committed


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED])
def test_the_leaders_drafts_are_sent_ahead_until_another_is_to_lead(sampling):
    bench = opened(sampling, led_by=MODEL)
    first = drafts = bench.answer(KEY, [5]).token_ids
    for number in range(6):
        bench.settle()
        if number == 4:
            bench.led_by(SMALL)
        drafts = bench.take(KEY, [*drafts, *said_by(MODEL, [*bench.texts[KEY], *drafts], 1, samples_q=False)])
        assert (drafts is None) == (number == 5), "it asks, for the other to answer"
        if number < 5:
            assert drafts == said_by(MODEL, bench.texts[KEY], K, samples_q=False)
    answer = bench.answer(KEY, [6])
    assert bench.beside().leader == SMALL
    bench.check(answer)
    judge = bench.several.judge
    assert judge.chosen[MODEL] == 5, "those that nobody asked for"
    assert judge.right[MODEL] == len(first) + 4 * K
    assert judge.judged[MODEL] == judge.right[MODEL] + 1


def test_who_is_ready_first_answers_while_the_other_reads():
    bench = TwoBench()
    bench.engines[SMALL].cached = 400
    prompt = [number % VOCAB for number in range(400)]
    first = bench.open(KEY, prompt)
    assert first.status is ProposalStatus.READY
    answer = bench.answer(KEY, [5])
    assert (answer.status, bench.beside().leader) == (ProposalStatus.OK, SMALL)
    bench.check(answer)
    assert all(told.status is not ProposalStatus.READY for told in bench.settle()), "told twice"
    assert bench.beside().models[MODEL].can_draft
    bench.led_by(MODEL)
    bench.check(bench.answer(KEY, [6]))
    assert bench.beside().leader == MODEL


def test_a_target_is_told_that_nobody_is_ready_and_then_that_one_is():
    bench = TwoBench()
    bench.open(KEY, range(300))
    (told,) = bench.commit(KEY, [5])
    assert told.status is ProposalStatus.NOT_READY
    assert [answer.status for answer in bench.settle()].count(ProposalStatus.READY) == 1


def test_whoever_gets_ready_first_again_is_announced():
    """After both fell behind, though one that rests was announced before."""
    bench = opened(led_by=MODEL)
    bench.answer(KEY, [5])
    bench.commit(KEY, [number % VOCAB for number in range(40)], k=0)
    (told,) = bench.commit(KEY, [7])
    assert told.status is ProposalStatus.NOT_READY
    own = bench.beside().models[SMALL]
    small = bench.several.models[SMALL]
    while not own.can_draft:
        work, answers = small.plan()
        work.execute()
        answers = bench.several._of(SMALL, [*answers, *small.complete(work)])
    assert [answer.proposals.status for answer in answers] == [ProposalStatus.READY]


@pytest.mark.parametrize("full", list(SALTS))
def test_without_room_for_one_the_other_answers(full):
    bench = opened(led_by=full, **{full: {"num_blocks": 6}})
    answers = [bench.answer(KEY, [number]) for number in range(8)]
    assert all(answer.status is ProposalStatus.OK for answer in answers)
    assert bench.beside().leader != full
    bench.check(answers[-1])


def test_the_target_hears_that_there_is_no_room_when_nobody_has_any():
    bench = opened(led_by=MODEL, **{name: {"num_blocks": 6} for name in SALTS})
    statuses = [bench.answer(KEY, [number]).status for number in range(8)]
    assert ProposalStatus.OUT_OF_KV in statuses


def test_one_that_has_no_room_for_a_text_reads_nothing_of_it():
    bench = TwoBench(small={"num_blocks": 40})
    bench.led_by(MODEL)
    bench.open(KEY, range(200))
    bench.settle()
    for number in range(40):
        bench.check(bench.answer(KEY, [number]))
        bench.settle()
    assert len(bench.engines[SMALL].free) == 40


def test_a_text_that_is_too_long_for_one_is_the_others():
    bench = opened(led_by=MODEL, draft_model={"max_model_len": 30})
    leaders = []
    for number in range(20):
        answer = bench.answer(KEY, [number])
        assert answer.status is ProposalStatus.OK
        bench.check(answer)
        leaders.append(bench.beside().leader)
    assert leaders == sorted(leaders)
    assert {*leaders} == {*SALTS}


def test_the_loop_counts_the_wait_for_a_model_that_is_not_the_first():
    bench = TwoBench()
    bench.led_by(SMALL)
    times = iter(range(0, 1000, 10))
    loop, sink = DraftLoop(bench.several, clock=lambda: next(times)), Sink()
    loop.attach(1, sink)
    loop.deliver(1, [prompt_of(KEY, list(range(20)))])
    loop.deliver(1, [Commit(1, 20, [5], K, K)])
    while loop.rounds == 0:
        work, answers = bench.several.plan()
        work.execute()
        outgoing = loop._outgoing([*answers, *bench.several.complete(work)])
        for to, said, work_us in outgoing:
            to.send(said, work_us)
    (*_, answer), work_us = sink.answers.queue[-1]
    assert answer.token_ids == said_by(SMALL, [*range(20), 5], K, samples_q=False)
    assert work_us > 0
    assert loop.sequences[1, 1].asked_len is None
    loop.deliver(1, [Close(1, CloseReason.FINISHED)])
    assert bench.several.usage()["num_sequences"] == 0


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED, SAMPLED])
def test_a_model_that_rests_is_judged_by_what_is_committed_unless_its_q_counts(sampling):
    bench = opened(sampling, led_by=MODEL)
    bench.answer(KEY, [5])
    for number in range(60):
        text = bench.texts[KEY]
        # Every second token is one that the small model would say.
        bench.answer(KEY, said_by(SMALL, text, 1, samples_q=False) if number % 2 else [number])
        bench.settle()
    judged, right = bench.several.judge.judged[SMALL], bench.several.judge.right[SMALL]
    if sampling is SAMPLED:
        assert judged == 0
    else:
        assert 20 <= judged <= 60
        assert 0.4 < right / judged < 0.6
        assert all(len(row.token_ids) == 1 for row in bench.engines[SMALL].plans[-1].rows)


def test_one_that_has_to_read_before_it_is_judged_does_both():
    bench = opened(led_by=MODEL)
    for _ in range(3):
        bench.answer(KEY, said_by(SMALL, bench.texts[KEY], 25, samples_q=False))
    own = bench.beside().models[SMALL]
    assert not own.can_draft
    work = bench.several._scoring(is_idle=False)
    assert work.name == SMALL
    while (name := work.name) == SMALL:
        work.execute()
        bench.several.complete(work)
        if own.can_draft:
            break
        work = bench.several._scoring(is_idle=False)
    assert name == SMALL
    judge = bench.several.judge
    assert judge.judged[SMALL] == judge.right[SMALL] == 24


def test_one_whose_q_counts_reads_what_it_is_to_be_tried_on():
    bench = opened(SAMPLED, led_by=MODEL)
    bench.answer(KEY, list(range(40)))
    own, judge = bench.beside().models[SMALL], bench.several.judge
    assert bench.several._scoring(is_idle=False) is None
    bench.beside().record.models[SMALL].since = 25
    while not own.can_draft:
        work = bench.several._scoring(is_idle=False)
        assert all(row.draw is None for row in work.work.plan.rows)
        work.execute()
        bench.several.complete(work)
    assert judge.judged[SMALL] == 0


def test_an_answer_that_says_nothing_but_that_it_is_overtaken_begins_no_round():
    bench = opened(limits=LookaheadLimits(ahead=False))
    for before, after in ((SMALL, MODEL), (MODEL, SMALL)):
        bench.led_by(before)
        assert bench.commit(KEY, [7]) == []
        bench.led_by(after)
        (overtaken,) = bench.commit(KEY, [8])
        assert (overtaken.token_ids, overtaken.base_committed_len) == ([], len(bench.texts[KEY]) - 1)
        assert bench.beside().answered_at is None
        bench.settle()


def test_who_waits_longest_comes_first_whichever_model_leads():
    bench = TwoBench(limits=LookaheadLimits(ahead=False))
    keys = {MODEL: (1, 1), SMALL: (1, 2)}
    for key in keys.values():
        bench.open(key, list(range(20)))
    bench.settle()
    for order in (list(SALTS), list(reversed(SALTS))):
        for name in order:
            bench.led_by(name)
            assert bench.commit(keys[name], [7]) == []
        work, _ = bench.several.plan()
        assert work.name == order[0]
        work.execute()
        bench.several.complete(work)
        bench.settle()


def test_look_ups_beside_two_models_are_sent_where_they_are_better():
    bench = TwoBench({"ngram": NgramStrategy(2, 4)})
    loop = [11, 12, 13, 14, 15, 16]
    bench.open(KEY, loop * 4)
    bench.settle()
    for _ in range(30):
        bench.answer(KEY, [loop[len(bench.texts[KEY]) % 6]])
    judge = bench.several.judge
    assert judge.chosen["ngram"] > 20
    assert bench.several.counters()["chosen"] == judge.chosen


def test_counters_and_usage_are_of_all_models():
    bench = opened()
    for name in SALTS:
        bench.led_by(name)
        bench.answer(KEY, [3])
    counted = bench.several.counters()
    assert set(counted["steps_of"]) == set(SALTS)
    assert all(sum(seconds["counts"]) > 0 for seconds in counted["steps_of"].values())
    steps = sum(len(engine.plans) for engine in bench.engines.values())
    assert counted["link_steps"][1] == pytest.approx(steps)
    usage = bench.several.usage()
    assert (usage["num_sequences"], usage["num_prefilling"]) == (1, 0)
    assert usage["kv_cache_usage"] == max(engine.kv_cache_usage for engine in bench.engines.values())
    bench.several.close(bench.strategy.sequences.pop(KEY))
    bench.several.unlink(1)
    assert bench.several.counters()["link_steps"] == {}


def test_another_version_of_the_learned_one_makes_what_was_counted_of_it_count_half():
    bench = opened()
    record, judge = bench.beside().record, bench.several.judge
    for name in SALTS:
        judge.verdict(record, name, 8, 10)
    bench.several.model.change_weights(lambda load: load({"a": 1}))
    bench.settle()
    assert bench.engines[MODEL].loaded == [{"a": 1}]
    assert bench.engines[SMALL].loaded == []
    assert [record.rates[name].looked_at for name in SALTS] == [5.0, 10.0]


def test_a_limit_of_the_vocabulary_holds_for_all():
    bench = TwoBench()
    bench.several.limit_vocabulary(500)
    assert all(model._num_drawable == 500 for model in bench.several.models.values())


def test_warming_up_is_of_every_model_and_leaves_nothing_behind():
    bench = TwoBench(chunk=128, **{name: {"max_model_len": 400} for name in SALTS})
    warm_up(bench.several, draft_top_n=64)
    assert all(len(engine.plans) > 20 for engine in bench.engines.values())
    assert all(model.step_us() > 0 for model in bench.several.models.values())
    assert set(bench.several.judge.judged.values()) == {0}
    assert not bench.several._beside


def test_requests_that_are_many_have_one_leader():
    bench = TwoBench(**{name: {"num_blocks": 5000} for name in SALTS})
    keys = [(1, number) for number in range(1, 12)]
    for key in keys:
        bench.open(key, list(range(20)))
    bench.settle()
    for number in range(10):
        for key in keys:
            judge, record = bench.several.judge, bench.beside(key).record
            judge.verdict(record, MODEL, 4 * (key[1] % 2), 4)  # each request's own would say otherwise
            bench.commit(key, [number])
        bench.settle()
    leaders = Counter(bench.beside(key).leader for key in keys)
    assert len(leaders) == 1


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_each_text_is_led_by_the_model_that_earns_most_on_it(sampling):
    play = Play(None, Times(), sampling, models=(MODEL, SMALL))
    led, kind = defaultdict(Counter), ""
    lead = play.strategy.judge.lead

    def counted(record, able, *rest):
        leader = lead(record, able, *rest)
        led[kind][leader] += 1
        return leader

    play.strategy.judge.lead = counted
    sources = [Texts(name, num_tokens=240) for name in ("easy", "hard words")]
    for source in sources * 3:
        kind = source.kind
        play.answer(*source.one(), source.right)
    share = {kind: counted[SMALL] / sum(counted.values()) for kind, counted in led.items()}
    assert share["hard words"] < 0.25
    assert share["easy"] > 2 * share["hard words"], "which takes a while under rejection: it has to be tried"
