"""A drafting proposer without a loop: sequences by their keys, and what is told of them."""

from __future__ import annotations

from typing import NamedTuple

from outrider.cluster.link.messages import DraftOrigin, DraftSampling, Open, ProposalStatus, SparseQ


class Told(NamedTuple):
    """An answer, by the key of its sequence."""

    key: tuple[int, int]
    base_committed_len: int
    token_ids: list[int]
    status: ProposalStatus
    q: SparseQ | None = None
    origin: DraftOrigin = DraftOrigin.NONE


def told(answers):
    found = []
    for sequence, said in answers:
        assert said.request == sequence.key[1]
        found.append(Told(sequence.key, said.base_committed_len, said.token_ids, said.status, said.q, said.origin))
    return found


def prompt_of(key, token_ids, num_speculative_tokens=4, sampling=None):
    """All of a prompt as one message."""
    return Open(key[1], len(token_ids), 0, token_ids, num_speculative_tokens, sampling or DraftSampling())


class Drive:
    """Opens, commits and closes as the loop does. Everything else is the proposer's own."""

    def __init__(self, proposer):
        self.proposer = proposer
        self.sequences = {}

    def __getattr__(self, name):
        return getattr(self.proposer, name)

    def open(self, key, token_ids, num_speculative_tokens=4, sampling=None):
        """The answer, if there is one at once."""
        self.close(key)
        sequence = self.sequences[key] = self.proposer.new_sequence(key)
        assert sequence.add_prompt(prompt_of(key, token_ids, num_speculative_tokens, sampling))
        answers = told(self.proposer.open(sequence))
        assert len(answers) < 2
        return answers[0] if answers else None

    def commit(self, key, commit):
        assert commit.base_committed_len == self.sequences[key].committed_len
        return told([*self.proposer.commit(self.sequences[key], commit), *self.proposer.delivered()])

    def close(self, key):
        """Keys that are not open are passed over."""
        sequence = self.sequences.pop(key, None)
        if sequence is not None:
            self.proposer.close(sequence)

    def plan(self):
        work, answers = self.proposer.plan()
        return work, told(answers)

    def complete(self, work):
        return told(self.proposer.complete(work))

    def work_off(self):
        """Until there is nothing to do. Returns all answers."""
        answers = []
        while (work := self.proposer.plan()[0]) is not None:
            work.execute()
            answers += self.complete(work)
        return answers
