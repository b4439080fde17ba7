"""The draft model's policy over an engine in memory, and one way to open, commit and step."""

import itertools

from outrider.actors.drafter.draft_model import DraftModelProposer
from outrider.cluster.link.messages import Commit, DraftSampling, ProposalStatus
from outrider.cluster.modes import Mode
from tests.unit.drafter.drive import Drive
from tests.unit.drafting_engine import MASK, MemoryEngine, continuation, drawn_token, lookahead, one_pass_continuation

GREEDY = DraftSampling()
SAMPLED = DraftSampling(Mode.REJECTION, temperature=0.8, seed=5, top_n=3)
KEY, OTHER = (1, 1), (2, 1)


class Bench:
    """A proposer, its engine, and one way to make commits."""

    def __init__(self, limits=None, chunk=16, kind_of_engine=MemoryEngine, one_pass=False, **engine):
        self.engine, self.chunk, self.one_pass = kind_of_engine(**engine), chunk, one_pass
        clock = itertools.count().__next__
        self.proposer = Drive(
            DraftModelProposer(self.engine, chunk, limits or lookahead(), clock=clock, one_pass=one_pass)
        )
        self.texts = {}

    def open(self, key, tokens, sampling=GREEDY, k=4):
        self.texts[key] = list(tokens)
        return self.proposer.open(key, list(tokens), k, sampling)

    def opened(self, tokens=range(10), sampling=GREEDY):
        """Open one request, whose prompt has been read then. Returns the bench."""
        self.open(KEY, tokens, sampling)
        self.settle()
        return self

    def commit(self, key, tokens, k=4, on_miss=None, has_drafts=False, num_paths=1):
        on_miss = k if on_miss is None else on_miss
        commit = Commit(key[1], len(self.texts[key]), tokens, k, on_miss, has_drafts, num_paths)
        self.texts[key] += tokens
        return self.proposer.commit(key, commit)

    def answer(self, key, tokens, k=4, on_miss=None, num_paths=1):
        """The one answer that is at hand; None if there is none."""
        answers = self.commit(key, tokens, k, on_miss, num_paths=num_paths)
        assert len(answers) < 2
        return answers[0] if answers else None

    def step(self):
        """One unit of work. Returns its answers; None when there is nothing to do."""
        work, answers = self.proposer.plan()
        if work is None:
            return answers or None
        work.execute()
        return answers + self.proposer.complete(work)

    def settle(self):
        """Work until nothing is left to draft ahead. Returns all answers."""
        answers = []
        while (more := self.step()) is not None:
            answers += more
        return answers

    def drafts(self, key, count=4, samples_q=False):
        return (one_pass_continuation if self.one_pass else continuation)(self.texts[key], count, samples_q)

    def choice(self, key, accepted, rank, start=0):
        """The drafter's rank-th choice after so many accepted drafts, as it is drawn for a round."""
        text = self.texts[key]
        before = [MASK] * accepted if self.one_pass else self.drafts(key, accepted, samples_q=start > 0)
        return drawn_token([*text, *before], start, rank)


def ids(draft):
    assert draft.status is ProposalStatus.OK
    return draft.token_ids
