"""Drives a proposer without a loop: sequences by their keys, and answers as they come out of its outbox."""

from __future__ import annotations

from typing import NamedTuple

from outrider.cluster.link.messages import (
    DraftOrigin,
    DraftPath,
    DraftSampling,
    Open,
    PrefetchedProposal,
    ProposalStatus,
    SparseQ,
)


class Told(NamedTuple):
    """An answer, by the key of its sequence."""

    key: tuple[int, int]
    base_committed_len: int
    token_ids: list[int]
    status: ProposalStatus
    q: SparseQ | None = None
    origin: DraftOrigin = DraftOrigin.NONE
    paths: tuple[DraftPath, ...] = ()


def prompt_of(key, token_ids, num_speculative_tokens=4, sampling=None):
    """Returns all of a prompt as one message."""
    return Open(key[1], token_ids, num_speculative_tokens, sampling or DraftSampling())


class Drive:
    """Opens, commits and closes as the loop does. Everything else is the proposer's own."""

    def __init__(self, proposer):
        self.proposer = proposer
        self.sequences = {}
        self.prefetched = []
        """(key, PrefetchedProposal) of all that was sent ahead."""

    def __getattr__(self, name):
        return getattr(self.proposer, name)

    def drain(self):
        """Returns the answers in the outbox."""
        found = []
        for sequence, said in self.proposer.outbox.drain():
            assert said.request == sequence.key[1]
            if isinstance(said, PrefetchedProposal):
                self.prefetched.append((sequence.key, said))
            else:
                fields = said.base_committed_len, said.token_ids, said.status, said.q, said.origin, said.paths
                found.append(Told(sequence.key, *fields))
        return found

    def open(self, key, token_ids, num_speculative_tokens=4, sampling=None):
        """Returns the answer, if there is one at once."""
        self.close(key)
        sequence = self.sequences[key] = self.proposer.new_sequence(key)
        sequence.take_prompt(prompt_of(key, token_ids, num_speculative_tokens, sampling))
        self.proposer.open(sequence)
        answers = self.drain()
        assert len(answers) < 2
        return answers[0] if answers else None

    def commit(self, key, commit):
        assert commit.base_committed_len == self.sequences[key].committed_len
        self.proposer.commit(self.sequences[key], commit)
        return self.drain()

    def close(self, key):
        """Keys that are not open are passed over."""
        sequence = self.sequences.pop(key, None)
        if sequence is not None:
            self.proposer.close(sequence)

    def plan(self):
        return self.proposer.plan(), self.drain()

    def complete(self, work):
        self.proposer.complete(work)
        return self.drain()

    def work_off(self):
        """Works until there is nothing to do. Returns all answers."""
        answers = []
        while (work := self.proposer.plan()) is not None:
            work.execute()
            answers += self.complete(work)
        return answers + self.drain()
