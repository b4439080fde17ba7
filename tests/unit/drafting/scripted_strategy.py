"""A drafting strategy whose steps wait for the test, and a sink for its answers."""

import queue
import threading

from outrider.actors.drafter.strategy import Draft, UnknownSequence
from outrider.cluster.link.messages import Origin, ProposalStatus

SOON_S = 10.0
FORESEEN = 77
"""A committed token whose continuation has been drafted ahead."""


class FakeStrategy:
    """Drafts [committed length, 0]: at once after FORESEEN, else in a step over all sequences that are due."""

    is_step = True

    def __init__(self):
        self.lengths, self.due, self.samplings, self.opened, self.batches = {}, [], {}, [], []
        self.q = None
        self.gate = threading.Event()
        self.gate.set()
        self.working = threading.Event()

    def open(self, key, token_ids, num_speculative_tokens, sampling):
        self.opened.append(key)
        self.samplings[key], self.lengths[key] = sampling, len(token_ids)
        return Draft(key, len(token_ids), [], ProposalStatus.READY)

    def commit(self, key, commit):
        if self.lengths.get(key) != commit.base_committed_len:
            raise UnknownSequence(key)
        self.lengths[key] += len(commit.token_ids)
        if commit.num_wanted == 0:
            return []
        if commit.token_ids[-1] == FORESEEN:
            return [self._draft(key, Origin.MAIN_LINE)]
        self.due.append(key)
        return []

    def close(self, key):
        self.lengths.pop(key, None)
        self.due = [other for other in self.due if other != key]

    def plan(self):
        if not self.due:
            return None, []
        self.batches.append(list(self.due))
        return self, []

    def execute(self):
        self.working.set()
        assert self.gate.wait(SOON_S)

    def complete(self, work):
        batch = [key for key in dict.fromkeys(self.batches[-1]) if key in self.due]
        self.due = [key for key in self.due if key not in batch]
        return [self._draft(key, Origin.MISS) for key in batch]

    def _draft(self, key, origin):
        return Draft(key, self.lengths[key], [self.lengths[key], 0], ProposalStatus.OK, self.q, origin)

    def step_us(self):
        return 1234

    def usage(self):
        return {"num_sequences": len(self.lengths), "num_prefilling": 0, "kv_cache_usage": 0.0}


class Sink:
    def __init__(self):
        self.answers = queue.Queue()

    def send(self, proposals, work_us):
        self.answers.put((list(proposals), work_us))

    def next(self):
        return self.answers.get(timeout=SOON_S)[0]
