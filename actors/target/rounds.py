"""The verifier's book of requests: what to tell the drafter, what it answered, whom a round still waits for. Pure.

``request_id`` is the engine's; ``handle`` is the link-local number that stands for it on the wire. A handle is never
used twice on a link, so an answer to an earlier life of a request (before a preemption) finds nobody.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from actors.messages import (
    MAX_NAME_LENGTH,
    Close,
    CloseReason,
    Commit,
    DraftSampling,
    Message,
    Name,
    Open,
    Proposals,
    ProposalStatus,
    SparseQ,
)


@dataclass(slots=True)
class TrackedRequest:
    request_id: str
    token_ids: list[int]
    """Committed: prompt and output."""

    num_speculative_tokens: int
    sampling: DraftSampling = field(default_factory=DraftSampling)
    handle: int | None = None
    """None while no link is up."""

    ready: bool = False
    """The drafter has drafted for this handle, so a round may wait for it."""

    commit_is_out: bool = False
    """The drafter has been told of a commit and has not answered it."""

    awaited: bool = False
    """A commit is out, the answer is not in, and the round waits for it."""

    drafts: list[int] = field(default_factory=list)
    """Proposed continuation of exactly token_ids. Kept until the next commit, whatever becomes of the link: the
    scheduler may hold them, and verification needs the q they were drawn from."""

    q: SparseQ | None = None
    """What the drafts were drawn from. None: not drawn, or verification need not know."""

    degraded: bool = False
    """It has decoded plainly for another reason than the length controller's choice."""

    def propose(self, drafts: list[int], q: SparseQ | None) -> None:
        self.drafts, self.q = drafts, q


class RoundBook:
    """Not thread-safe: the engine's step owns it."""

    def __init__(self, names_requests: bool = False) -> None:
        """names_requests: tell the drafter their ids."""
        self._names_requests = names_requests
        self._requests: dict[str, TrackedRequest] = {}
        self._by_handle: dict[int, TrackedRequest] = {}
        self._outbox: list[Message] = []
        self._next_handle = 1
        self._linked = False
        self.stale = 0
        """Proposals dropped because they continue another committed length than the request's."""

        self.unusable = 0
        """Proposals that cannot have been drawn as the request asked, or that the scheduler changed."""

        self.refused: dict[ProposalStatus, int] = {}
        """Answers without drafts, by reason."""

        self.wanted: dict[int, int] = {}
        """Commits by the number of drafts wanted."""

        self.degraded: dict[str, int] = {}
        """Requests that decoded plainly though they need not have, by the first cause: ``no_link``, ``late``,
        ``out_of_kv``, ``length``, ``unusable``."""

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def link_up(self) -> None:
        """A new link knows nobody: open every request on it with all its committed tokens."""
        self.link_down()
        self._linked = True
        for request in self._requests.values():
            self._open(request)

    def link_down(self) -> None:
        self._linked = False
        self._by_handle.clear()
        self._outbox.clear()
        for request in self._requests.values():
            request.handle = None
            request.ready = request.awaited = request.commit_is_out = False

    def track(self, request: TrackedRequest) -> None:
        self._requests[request.request_id] = request
        if self._linked:
            self._open(request)

    def untrack(self, request_id: str, reason: CloseReason) -> None:
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._close(request, reason)

    def commit(
        self, request_id: str, token_ids: Sequence[int], finished: bool, num_wanted: int, num_on_miss: int
    ) -> None:
        """A step committed token_ids (accepted drafts and the next token). finished: nothing more will be needed.

        num_wanted, num_on_miss: as in Commit, cut to what the request allows.
        """
        request = self._requests.get(request_id)
        if request is None or not token_ids:
            return
        base = len(request.token_ids)
        request.token_ids.extend(token_ids)
        request.propose([], None)
        request.awaited = request.commit_is_out = False
        if finished:
            return
        wanted = min(num_wanted, request.num_speculative_tokens)
        self.wanted[wanted] = self.wanted.get(wanted, 0) + 1
        if request.handle is None:
            if wanted:
                self.degrade(request_id, "no_link")
        else:
            request.commit_is_out, request.awaited = wanted > 0, wanted > 0 and request.ready
            self._outbox.append(Commit(request.handle, base, token_ids, wanted, min(num_on_miss, wanted)))

    def degrade(self, request_id: str, cause: str) -> None:
        """The request decodes plainly for a round. Counts once in its life."""
        request = self._requests.get(request_id)
        if request is not None and not request.degraded:
            request.degraded = True
            self.degraded[cause] = self.degraded.get(cause, 0) + 1

    def take_outbox(self) -> list[Message]:
        outbox, self._outbox = self._outbox, []
        return outbox

    def receive(self, messages: Iterable[Message]) -> list[tuple[str, Proposals]]:
        """Apply the drafter's answers. Those of a closed handle or another committed length are dropped. Returns the
        answers to last commits, with whose they are."""
        answers = []
        for message in messages:
            if not isinstance(message, Proposals):
                continue
            request = self._by_handle.get(message.request)
            if request is None:
                self.stale += 1
                continue
            if message.status not in (ProposalStatus.OK, ProposalStatus.READY):
                if message.base_committed_len == len(request.token_ids):
                    answers.append((request.request_id, message))
                self._refused(request, message.status)
                continue
            request.ready = True
            if message.status is ProposalStatus.OK and message.base_committed_len == len(request.token_ids):
                request.awaited = request.commit_is_out = False
                self._take(request, message)
                answers.append((request.request_id, message))
                continue
            self.stale += message.status is ProposalStatus.OK
            # Prefilled, or busy with an older commit until now: the answer to the last commit comes next.
            request.awaited = request.commit_is_out
        return answers

    def unanswered(self) -> bool:
        """A commit is out that a drafter in good health would answer, if only with NOT_READY."""
        return any(request.commit_is_out for request in self._requests.values())

    def awaited(self) -> bool:
        return any(request.awaited for request in self._requests.values())

    def give_up_waiting(self) -> list[str]:
        """Stop waiting in this round. Returns whose answers are late."""
        late = [request.request_id for request in self._requests.values() if request.awaited]
        for request_id in late:
            self._requests[request_id].awaited = False
            self.degrade(request_id, "late")
        return late

    def take_drafts(self, request_ids: Collection[str]) -> list[list[int]]:
        """Drafts of each request, [] where there are none. Those of a request that then sits a step out are handed
        out again."""
        return [list(r.drafts) if (r := self._requests.get(i)) is not None else [] for i in request_ids]

    def q_of(self, request_id: str, drafts: Sequence[int], position: int) -> tuple[bool, SparseQ | None]:
        """For verification: whether these scheduled drafts, whose first stands at `position`, are the request's
        proposal (the beginning of it: the scheduler may cut), and what it was drawn from."""
        request = self._requests.get(request_id)
        known = (
            request is not None and position == len(request.token_ids) and list(drafts) == request.drafts[: len(drafts)]
        )
        return known, request.q if known and request is not None else None

    def _take(self, request: TrackedRequest, message: Proposals) -> None:
        sampling, q = request.sampling, message.q
        if not sampling.mode.samples_q:
            q = None
        elif q is not None and q.ids.shape[1] != sampling.top_n:
            self.unusable += 1
            self.degrade(request.request_id, "unusable")
            return
        request.propose([int(token) for token in message.token_ids][: request.num_speculative_tokens], q)

    def _refused(self, request: TrackedRequest, status: ProposalStatus) -> None:
        self.refused[status] = self.refused.get(status, 0) + 1
        if status in (ProposalStatus.OUT_OF_KV, ProposalStatus.LENGTH):
            self.degrade(request.request_id, status.name.lower())
        request.ready = request.awaited = False
        # A drafter that is still prefilling answers the commit when it is done, the others never do.
        request.commit_is_out = request.commit_is_out and status is ProposalStatus.NOT_READY
        if status is ProposalStatus.UNKNOWN_REQUEST:
            self._close(request, CloseReason.ABORTED)
            self._open(request)

    def _open(self, request: TrackedRequest) -> None:
        request.handle, self._next_handle = self._next_handle, self._next_handle + 1
        request.ready = request.awaited = request.commit_is_out = False
        self._by_handle[request.handle] = request
        if self._names_requests:
            self._outbox.append(Name(request.handle, request.request_id[:MAX_NAME_LENGTH]))
        self._outbox.append(
            Open(
                request=request.handle,
                prompt_len=len(request.token_ids),
                offset=0,
                token_ids=list(request.token_ids),
                num_speculative_tokens=request.num_speculative_tokens,
                sampling=request.sampling,
            )
        )

    def _close(self, request: TrackedRequest, reason: CloseReason) -> None:
        if request.handle is not None:
            self._by_handle.pop(request.handle, None)
            self._outbox.append(Close(request.handle, reason))
            request.handle = None
