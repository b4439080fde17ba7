"""A proposer whose steps wait for the test, and a sink for its answers."""

import queue
import threading

from outrider.actors.drafter.proposer import Outbox, Sequence
from outrider.cluster.link.messages import DraftOrigin, ProposalStatus

SOON_S = 60.0
FORESEEN = 77
"""A committed token whose continuation has been drafted ahead."""


class FakeProposer:
    """Drafts [committed length, 0]: at once after FORESEEN, else in a step over all sequences that are due."""

    is_step = True

    def __init__(self):
        self.open_sequences, self.due, self.samplings, self.opened, self.batches = {}, [], {}, [], []
        self.outbox, self.q = Outbox(), None
        self.gate = threading.Event()
        self.gate.set()
        self.working = threading.Event()

    def new_sequence(self, key):
        return Sequence(key)

    def open(self, sequence):
        assert sequence.key not in self.open_sequences
        self.opened.append(sequence.key)
        self.samplings[sequence.key], self.open_sequences[sequence.key] = sequence.sampling, sequence
        self.outbox.add(sequence, sequence.no_drafts(ProposalStatus.READY))

    def commit(self, sequence, commit):
        sequence.commit(commit)
        if commit.num_wanted and commit.token_ids[-1] == FORESEEN:
            self._draft(sequence, DraftOrigin.MAIN_LINE)
        elif commit.num_wanted:
            self.due.append(sequence)

    def close(self, sequence):
        del self.open_sequences[sequence.key]
        self.due = [other for other in self.due if other is not sequence]

    def plan(self):
        if not self.due:
            return None
        self.batches.append(list(self.due))
        return self

    def execute(self):
        self.working.set()
        assert self.gate.wait(SOON_S)

    def complete(self, work):
        batch = [sequence for sequence in dict.fromkeys(self.batches[-1]) if sequence in self.due]
        self.due = [sequence for sequence in self.due if sequence not in batch]
        for sequence in batch:
            self._draft(sequence, DraftOrigin.MISS)

    def _draft(self, sequence, origin):
        self.outbox.add(sequence, sequence.drafts([sequence.committed_len, 0], self.q, origin))

    def step_us(self):
        return 1234

    def usage(self):
        return {"num_sequences": len(self.open_sequences), "num_prefilling": 0, "kv_cache_usage": 0.0}

    def counters(self):
        return {}


class Sink:
    def __init__(self):
        self.answers = queue.Queue()

    def send(self, proposals, work_us):
        self.answers.put((list(proposals), work_us))

    def next(self):
        return self.answers.get(timeout=SOON_S)[0]
