"""A link made of two lists, drafters that answer by rule, and an engine's steps over a Round. Time passes only where
somebody waits."""

from dataclasses import replace
from types import SimpleNamespace

from outrider.actors.round.length import FixedLengths, Lengths
from outrider.actors.round.request import Deployment, Draft
from outrider.actors.round.round import Arrival, Round, Step
from outrider.cluster.config import LinkConfig
from outrider.cluster.link import LinkBroken, Received
from outrider.cluster.link.messages import Commit, Open, Proposals, ProposalStatus, unpack

PROMPT = [5, 6, 7]
DEPLOYMENT = Deployment(
    verification="rejection", num_speculative_tokens=4, draft_top_n=2, vocab_size=20_000, max_model_len=20_000
)


def params(**changes):
    """What is read of vLLM's SamplingParams, at its defaults."""
    fields = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "seed": None,
        "structured_outputs": None,
        "extra_args": None,
        "allowed_token_ids": None,
        "logit_bias": None,
        "bad_words_token_ids": None,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_tokens": 0,
        "max_tokens": None,
        "stop_token_ids": None,
        "ignore_eos": False,
        "all_stop_token_ids": set(),
    }
    return SimpleNamespace(**{**fields, **changes})


GREEDY = params(temperature=0.0)


def asked(**ours):
    """extra_args of a request of ours."""
    return {"outrider": ours}


def arrival(request_id="a", prompt=PROMPT, of=GREEDY):
    return Arrival(request_id, of, None if prompt is None else list(prompt), len(PROMPT if prompt is None else prompt))


class FakeLink:
    """What a conversation uses of a Link. answer: called with every message posted; what it returns arrives at once.
    sleep: called with seconds."""

    epoch = 1

    def __init__(self, answer, sleep):
        self.broken = None
        self.sent, self.inbox, self.polls = [], [], []
        self._answer, self._sleep = answer, sleep

    def post(self, payload, work_us=0):
        if self.broken:
            raise LinkBroken(self.broken)
        for message in unpack(payload, 20_000, 8):
            self.sent.append(message)
            self.arrive(*self._answer(message))

    def arrive(self, *proposals, work_us=0):
        if proposals:
            self.inbox.append(Received(list(proposals), work_us))

    def poll(self, timeout_s=0.0):
        self.polls.append(timeout_s)
        if self.inbox:
            return self.inbox.pop(0)
        self._sleep(timeout_s)
        return None

    def abort(self, reason):
        self.broken = f"aborted on this side: {reason}"

    def close(self, reason):
        self.broken = f"closed on this side: {reason}"


def silent(message):
    return []


def drafting(drafts, q=None, paths=()):
    """A drafter that is ready at once and answers every commit with drafts."""

    def answer(message):
        if isinstance(message, Open):
            return [Proposals(message.request, len(message.token_ids), [], ProposalStatus.READY)]
        if isinstance(message, Commit) and message.num_wanted:
            return [Proposals(message.request, message.committed_len, drafts, q=q, paths=paths)]
        return []

    return answer


def never_after_ready(message):
    return (
        [Proposals(message.request, len(message.token_ids), [], ProposalStatus.READY)]
        if isinstance(message, Open)
        else []
    )


class Wanting(FixedLengths):
    """Wants what it is told to."""

    wanted = Lengths(4, 2)

    def __init__(self):
        super().__init__(4)

    def choose(self, estimates, trees=False):
        return [self.wanted] * len(estimates)


class Engine:
    """One process's steps. answer: the rule of the drafter that is linked from the start; None: nobody is."""

    def __init__(
        self,
        answer=None,
        *,
        round_deadline_ms=10.0,
        round_deadline_steps=None,
        link_deadline_ms=60_000.0,
        lengths=None,
        num_paths=1,
        draft_top_n=2,
        **options,
    ):
        self.now, self._number = 0.0, 0
        config = LinkConfig(
            round_deadline_ms=round_deadline_ms,
            round_deadline_steps=round_deadline_steps,
            link_deadline_ms=link_deadline_ms,
        )
        self.lengths = lengths or Wanting()
        self.verified = []
        """The drafts and q of each choice, by request."""

        deployment = replace(DEPLOYMENT, num_paths=num_paths, draft_top_n=draft_top_n)
        self.round = Round(self._choose, deployment, config, self.lengths, clock=lambda: self.now, **options)
        self.drafter = self.round._drafter
        self.link = None if answer is None else self.offer(answer)

    def sleep(self, seconds):
        self.now += seconds

    def offer(self, answer=silent):
        link = FakeLink(answer, self.sleep)
        self.round.offer_link(link)
        return link

    def __getitem__(self, request_id):
        return self.round.requests[request_id]

    def begin(self, *arrived, drafts=None, num_requests=1, decodes_only=True, **events):
        """arrived: request ids or Arrivals. drafts: ids by request. events: a Step's."""
        self._number += 1
        drafts = drafts or {}
        num_tokens = num_requests + sum(map(len, drafts.values()))
        drafts = {request_id: Draft(list(ids)) for request_id, ids in drafts.items()}
        arrived = [each if isinstance(each, Arrival) else arrival(each) for each in arrived]
        step = Step(self._number, num_tokens, decodes_only, drafts, arrived, **events)
        self.round.begin(step)
        return step

    def tell(self, **events):
        """A step without tokens."""
        self.round.begin(Step(0, 0, True, {}, **events))

    def commit(self, committed, drafts=None, **events):
        """Begins a step, and commits what it chose. Returns it."""
        step = self.begin(drafts=drafts, num_requests=len(committed), **events)
        self.round.commit(step, committed)
        return step

    def step(self, committed, drafts=None, **events):
        """A whole one; returns what is drafted for the next."""
        return self.round.take_drafts(self.commit(committed, drafts, **events), list(committed))

    def choose(self, step, *request_ids):
        self.round.choose(step, request_ids, None, None)
        return self.verified[-1]

    def hear(self, *messages):
        return self.drafter.hear(messages)

    def said(self, kind):
        """Everything of a kind that the link's drafter was told."""
        self.drafter.flush()
        return [message for message in self.link.sent if isinstance(message, kind)]

    def _choose(self, logits, requests, drafts, width, metadata):
        self.verified.append({r.request_id: (d.ids, d.q) for r, d in zip(requests, drafts, strict=True)})


def opened(engine, request_id="a", ready=True, of=GREEDY):
    """A request whose drafter reports READY. Returns the handle."""
    engine.begin(arrival(request_id, of=of))
    handle = engine[request_id].handle
    if ready:
        engine.hear(Proposals(handle, len(PROMPT), [], ProposalStatus.READY))
    return handle
