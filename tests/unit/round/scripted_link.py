"""A link made of two lists, drafters that answer by rule, and a verifier's steps over it."""

import time

from outrider.actors.round.length import FixedLengths
from outrider.actors.round.round import TrackedRequest, Verifier
from outrider.cluster.config import LinkConfig
from outrider.cluster.link import LinkBroken, Received
from outrider.cluster.link.codec import unpack
from outrider.cluster.link.messages import Commit, Open, Proposals, ProposalStatus

PROMPT = [5, 6, 7]


class FakeLink:
    """What the verifier uses of a Link. answer: called with every message posted; what it returns arrives at once."""

    capacity_words = 512
    epoch = 1

    def __init__(self, answer=lambda message: []):
        self.broken = None
        self.sent, self.inbox, self.polls = [], [], []
        self._answer = answer

    def post(self, payloads, work_us=0):
        if self.broken:
            raise LinkBroken(self.broken)
        for payload in payloads:
            for message in unpack(payload, 1000, 8):
                self.sent.append(message)
                self.arrive(*self._answer(message))

    def arrive(self, *proposals, work_us=0):
        if proposals:
            self.inbox.append(Received(list(proposals), work_us, 0, 0))

    def poll(self, timeout_s=0.0):
        self.polls.append(timeout_s)
        if self.inbox:
            return self.inbox.pop(0)
        time.sleep(timeout_s)
        return None

    def abort(self, reason):
        self.broken = f"aborted on this side: {reason}"

    def retire(self, reason):
        self.broken = f"closed on this side: {reason}"


def drafting(drafts):
    """A drafter that is ready at once and answers every commit with drafts."""

    def answer(message):
        if isinstance(message, Open):
            return [Proposals(message.request, message.prompt_len, [], ProposalStatus.READY)]
        if isinstance(message, Commit) and message.num_wanted:
            return [Proposals(message.request, message.committed_len, drafts)]
        return []

    return answer


def never_after_ready(message):
    return (
        [Proposals(message.request, message.prompt_len, [], ProposalStatus.READY)] if isinstance(message, Open) else []
    )


def make(link=None, round_deadline_ms=10.0, link_deadline_ms=60_000.0, lengths=None):
    config = LinkConfig(round_deadline_ms=round_deadline_ms, link_deadline_ms=link_deadline_ms)
    verifier = Verifier(config, lengths or FixedLengths(4))
    if link is not None:
        verifier.offer_link(link)
        verifier.begin_step()
    return verifier


def tracked(request_id="a"):
    return TrackedRequest(request_id, list(PROMPT), 4)


def step(verifier, committed, num_drafts=None, finished=()):
    verifier.step_starts(len(committed), len(committed), decodes_only=True)
    verifier.begin_step()
    verifier.end_step(committed, num_drafts or {}, finished)
    return verifier.take_drafts(list(committed))
