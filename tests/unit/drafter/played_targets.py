"""Targets of several links over one drafting proposer, in time that is counted in the drafter's steps."""

import random
from collections import Counter, defaultdict

from outrider.actors.drafter.engine import Drawn
from outrider.cluster.link.messages import ProposalStatus
from tests.unit.drafter.draft_bench import Bench
from tests.unit.drafting_engine import MemoryEngine, drawn_token

K = 3
VERIFICATION_STEPS = 4


class QuickEngine(MemoryEngine):
    """What it draws goes by the position alone: for tests of when, not of what."""

    def run(self, plan):
        return [[self._at(draw.position) for draw in row.draws] for row in plan.rows]

    def _at(self, position):
        others = tuple((drawn_token([position], rank=rank), 0.2 / rank) for rank in (1, 2))
        return Drawn(drawn_token([position]), confidence=0.7, alternatives=others)


class PlayedTargets:
    """Every sequence is verified for VERIFICATION_STEPS, then committed, and waits for its drafts."""

    def __init__(self, limits=None, chunk=64, seed=0):
        self.bench = Bench(limits, chunk, QuickEngine, num_blocks=10000, max_model_len=2000, block_size=16)
        self.now = 0
        self.waits = defaultdict(list)
        """Steps that the targets of each link waited for an answer."""

        self.ready = {}
        """When a prompt was."""

        self.rows = Counter()
        """Rows of each link in all steps."""

        self._rng = random.Random(seed)
        self._acceptance, self._asked, self._due, self._drafts = {}, {}, {}, {}

    def open(self, key, prompt, acceptance=0.8):
        self._acceptance[key] = acceptance
        answer = self.bench.open(key, prompt, k=K)
        self._hear([] if answer is None else [answer])

    def run(self, steps):
        for _ in range(steps):
            self.step()

    def step(self):
        self.now += 1
        for key in [key for key, at in self._due.items() if at <= self.now]:
            del self._due[key]
            self._commit(key)
        work, answers = self.bench.proposer.plan()
        self._hear(answers)
        if work is not None:
            self.rows.update(sequence.key[0] for sequence, _ in work.targets)
            work.execute()
            self._hear(self.bench.proposer.complete(work))
        return work

    def _commit(self, key):
        drafts, text = self._drafts.pop(key, []), self.bench.texts[key]
        accepted = 0
        while accepted < len(drafts) and self._rng.random() < self._acceptance[key]:
            accepted += 1
        # The model's own next token, the likeliest of its alternatives, or one that nobody foresees.
        rank = self._rng.choice([1, 7]) if accepted < len(drafts) else self._rng.choice([0, 0, 1, 7])
        token = drawn_token([len(text) + accepted], rank=rank)
        self._asked[key] = self.now
        self._hear(self.bench.commit(key, [*drafts[:accepted], token], K))

    def _hear(self, answers):
        for told in answers:
            if told.status is ProposalStatus.READY:
                self.ready[told.key] = self.now
                self._due[told.key] = self.now + 1
            elif told.status is ProposalStatus.OK and told.base_committed_len == len(self.bench.texts[told.key]):
                self.waits[told.key[0]].append(self.now - self._asked[told.key])
                self._drafts[told.key] = told.token_ids
                self._due[told.key] = self.now + VERIFICATION_STEPS
