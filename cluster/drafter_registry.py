"""Assigns drafters to verifiers. The registry actor holds one ``DrafterRegistry``, which does no input or output.

A target whose replica owns a drafter uses that one, every other target the least loaded of the pool. It keeps it until
that drafter leaves or drains, or another of the pool is unused. While its drafter is unreachable, another one is lent.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, replace

from outrider.cluster.config import OutriderConfig
from outrider.cluster.link.messages import PROTOCOL_VERSION

SETTLE_S = 5.0
"""How long no target moves to an unused drafter after one has asked for the first time: a new registry does not know
yet which drafters the others are linked to."""


def fingerprint(config: OutriderConfig) -> str:
    """Hashes what both ends of a link must agree on: models, tokens, drafting method and protocol.

    While a deployment is replaced, members of the old and the new configuration run side by side.
    """
    drafter, target = config.remote_drafter, config.target
    where = {"placement", "cores", "node_labels", "num_drafters", "autoscaling"}
    agreed = {
        "protocol": PROTOCOL_VERSION,
        "drafter": None if drafter is None else drafter.model_dump(mode="json", exclude=where),
        "speculation": config.speculation.model_dump(mode="json"),
        "target": [target.model, target.revision, target.engine_args.get("tokenizer")],
    }
    return hashlib.sha256(json.dumps(agreed, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class LinkGrant:
    """Permits one link. epoch is greater than that of every link granted before."""

    epoch: int
    drafter: str
    has_others: bool = False
    """Whether other drafters are not known to be unreachable, so that this one need not be waited for."""


@dataclass(frozen=True)
class Assignment:
    """Names the drafter that a verifier should have. at_once: its present one is draining."""

    drafter: str | None
    at_once: bool = False


@dataclass
class LinkReport:
    """Holds a verifier's last report of its link. state: ``connecting``, ``up`` or ``down``."""

    state: str
    epoch: int = 0
    drafter: str = ""
    reconnects: int = 0
    rtt_us: float = 0.0
    last_error: str = ""
    backend: str = ""
    """The wire of a link that is up: ipc, tcp, or one of backends.DEVICE_BACKENDS."""


@dataclass(frozen=True)
class Member:
    """Describes a replica, in each of its heartbeats."""

    replica: str
    drafter: str | None = None
    """Name of its drafter's actor; None: it has none, or it has not loaded."""

    pooled: bool = False
    """Whether its drafter serves other replicas' verifiers; it has none itself."""

    fingerprint: str = ""
    node: str = ""
    """Node of its drafter."""

    draining: bool = False
    """Whether it is being taken down; its drafter gets no more verifiers."""

    trouble: str = ""
    """Why its drafter has not loaded; empty: nothing has failed."""


@dataclass(frozen=True)
class Work:
    """Describes a target's load, in tokens a second as its length controller expects them; 0: not known."""

    rows: float = 0.0
    """Running requests that may be drafted for."""

    rate: float = 0.0
    """Rate with drafts."""

    plain_rate: float = 0.0
    """Rate without drafts."""

    @property
    def is_busy(self) -> bool:
        return self.rows > 0


@dataclass(frozen=True)
class Verifier:
    """Describes a verifier that asks for a drafter."""

    name: str
    """Name of its replica."""

    fingerprint: str = ""
    node: str = ""
    linked_to: str = ""
    """Drafter of the link that is up."""

    work: Work = Work()


@dataclass
class DrafterRegistry:
    """Keeps members, links and assignments. ``now``: seconds of one clock."""

    members: dict[str, Member] = field(default_factory=dict)
    """Replica -> its last heartbeat."""

    ends: dict[str, float] = field(default_factory=dict)
    """Replica -> when it counts as gone, unless it renews before."""

    verifiers: dict[str, Verifier] = field(default_factory=dict)
    """Name -> verifier, from its last call."""

    links: dict[str, LinkReport] = field(default_factory=dict)
    """Verifier -> its last report."""

    assigned: dict[str, str] = field(default_factory=dict)
    """Verifier -> drafter."""

    granted: dict[str, str] = field(default_factory=dict)
    """Verifier -> drafter of its last grant, which is lent where it is not the assigned one."""

    epoch: int = 0
    _settled_at: float = -math.inf

    def renew(self, member: Member, lasts_s: float, now: float) -> None:
        self.ends[member.replica] = now + lasts_s
        known = self.members.get(member.replica)
        # A heartbeat that was sent before it drained does not end that.
        draining = member.draining or (known is not None and known.draining)
        self.members[member.replica] = replace(member, draining=draining)

    def expire(self, now: float) -> None:
        for name in [name for name, end in self.ends.items() if end <= now]:
            self.leave(name)
        for name in (self.verifiers.keys() | self.links.keys()) - self.ends.keys():
            self.leave(name)

    def leave(self, replica: str) -> None:
        for table in (self.ends, self.members, self.verifiers, self.links, self.assigned, self.granted):
            table.pop(replica, None)

    def drain(self, replica: str) -> list[str]:
        """Makes all verifiers leave a replica's drafter. Returns the linked ones that can move to another."""
        member = self.members.get(replica)
        if member is None or member.drafter is None:
            return []
        self.members[replica] = replace(member, draining=True)
        asked = [self.verifiers[name] for name in self.users(member.drafter) if name in self.verifiers]
        return [verifier.name for verifier in asked if self._pool(verifier)]

    def report(self, verifier: str, link: LinkReport) -> None:
        self.links[verifier] = link

    def users(self, drafter: str) -> list[str]:
        """Returns the verifiers whose links to it are up."""
        return sorted(name for name, link in self.links.items() if link.drafter == drafter and link.state == "up")

    def grant(self, verifier: Verifier, unreachable: Collection[str], last_epoch: int, now: float) -> LinkGrant | None:
        """Grants a link to the assigned drafter, or to the next best where that one is unreachable.

        None: there is no drafter at all. When all are unreachable the first is tried again. last_epoch: of the
        verifier's last link; a new registry has not granted it.
        """
        assigned = self.assigned_to(verifier, now).drafter
        loads = self._loads(verifier)
        others = [each for each in self.members.values() if each.drafter and each.fingerprint == verifier.fingerprint]
        staying = [each for each in others if not each.draining]
        ordered = sorted(staying, key=lambda each: _order(each, verifier, loads))
        candidates = list(dict.fromkeys(filter(None, [assigned, *(each.drafter for each in ordered)])))
        if not candidates:
            return None
        self.epoch = max(self.epoch, last_epoch) + 1
        reachable = [name for name in candidates if name not in unreachable]
        drafter = self.granted[verifier.name] = (reachable or candidates)[0]
        return LinkGrant(self.epoch, drafter, len(reachable) > 1)

    def assigned_to(self, verifier: Verifier, now: float) -> Assignment:
        """Returns which drafter the verifier should have now."""
        if verifier.name not in self.verifiers:
            self._settled_at = now + SETTLE_S
        self.verifiers[verifier.name] = verifier
        self._note_link(verifier)
        drafters = {member.drafter: member for member in self.members.values() if member.drafter}
        if verifier.linked_to and verifier.linked_to not in drafters:  # its replica has not renewed here yet
            self.assigned.pop(verifier.name, None)
            return Assignment(verifier.linked_to)
        drafter = self._own(verifier.name) or self._choose_from_pool(verifier, now)
        if drafter is None:
            self.assigned.pop(verifier.name, None)
        else:
            self.assigned[verifier.name] = drafter
        goes = bool(verifier.linked_to) and drafters[verifier.linked_to].draining
        return Assignment(drafter, at_once=goes)

    def _own(self, verifier: str) -> str | None:
        """Returns the drafter of the verifier's own replica."""
        member = self.members.get(verifier)
        return None if member is None or member.pooled else member.drafter

    def _choose_from_pool(self, verifier: Verifier, now: float) -> str | None:
        """Chooses a drafter of the pool.

        After a move the new drafter prefills the text of every running request. So a verifier moves only to an unused
        drafter, and only from the most loaded one.
        """
        pool, loads = self._pool(verifier), self._loads(verifier)
        best = min(pool.values(), key=lambda each: _order(each, verifier, loads), default=None)
        current = self.assigned.get(verifier.name) or verifier.linked_to
        if best is None or current not in pool:
            return None if best is None else best.drafter
        is_fullest = loads[current] > 0 and loads[current] == max(loads[name] for name in pool)
        moves = is_fullest and loads[str(best.drafter)] == 0 and now >= self._settled_at
        return best.drafter if moves else current

    def _pool(self, verifier: Verifier) -> dict[str, Member]:
        """Returns the pool's drafters that may draft for it and stay, by name."""
        return {
            member.drafter: member
            for member in self.members.values()
            if member.drafter
            and member.pooled
            and not member.draining
            and member.fingerprint == verifier.fingerprint
        }  # fmt: skip

    def _loads(self, verifier: Verifier) -> Counter[str]:
        """Counts, by drafter, the other verifiers that are assigned to it or were lent it."""
        pairs = {*self.assigned.items(), *self.granted.items()}
        return Counter(drafter for name, drafter in pairs if name != verifier.name)

    def _note_link(self, verifier: Verifier) -> None:
        """Corrects the verifier's link report, which may have been lost or sent to another registry."""
        known = self.links.get(verifier.name)
        of_link = known.drafter if known is not None and known.state == "up" else ""
        if verifier.linked_to and verifier.linked_to != of_link:
            self.links[verifier.name] = LinkReport("up", drafter=verifier.linked_to)
        elif known is not None and of_link and not verifier.linked_to:
            self.links[verifier.name] = replace(known, state="down")


def _order(member: Member, verifier: Verifier, loads: Counter[str]) -> tuple[int, bool, str]:
    """Orders drafters for a verifier: the least loaded first, then those on its node."""
    is_near = bool(member.node) and member.node == verifier.node
    return loads[str(member.drafter)], not is_near, str(member.drafter)
