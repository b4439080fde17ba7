"""Who is in the deployment, and who drafts for whom. Pure: the registry holds one ``DrafterRegistry``.

A target whose replica owns a drafter uses that one, every other the least loaded of the pool. It stays there until that
drafter goes, drains, or another of the pool is empty. While its drafter cannot be reached it is lent another.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, replace

from outrider.cluster.config import OutriderConfig
from outrider.cluster.link.frame import PROTOCOL_VERSION

SETTLE_S = 5.0
"""How long nobody moves to an empty drafter after a target has asked for the first time: a new registry does not know
yet which drafters the others are linked to."""


def fingerprint(config: OutriderConfig) -> str:
    """Hashes what both ends of a link have to agree on: models, tokens, how is drafted, and the protocol.

    A deployment that is replaced by another configuration has members of both for a while.
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
    """There are other drafters not known to be unreachable: this one need not be waited for."""


@dataclass(frozen=True)
class Assignment:
    """Names the drafter that a verifier should have. at_once: the one that it has now is about to go."""

    drafter: str | None
    at_once: bool = False


@dataclass
class LinkReport:
    """Holds what a verifier last said of its link. state: ``connecting``, ``up`` or ``down``."""

    state: str
    epoch: int = 0
    drafter: str = ""
    reconnects: int = 0
    rtt_us: float = 0.0
    last_error: str = ""
    backend: str = ""
    """Of a link that is up: local, gloo, or one of backends.DEVICE_BACKENDS."""


@dataclass(frozen=True)
class Member:
    """Describes a replica; it says so itself with every heartbeat."""

    replica: str
    drafter: str | None = None
    """Name of its drafter's actor; None: it has none, or it has not loaded."""

    pooled: bool = False
    """Its drafter is there for others: it has no verifier itself."""

    fingerprint: str = ""
    node: str = ""
    """Its drafter's."""

    draining: bool = False
    """It is about to go: nobody is assigned to its drafter any more."""

    trouble: str = ""
    """Why its drafter is not there yet; empty: nothing has failed."""


@dataclass(frozen=True)
class Work:
    """Says what a target does, tokens a second as its length controller expects them; 0: not known."""

    rows: float = 0.0
    """Running requests that may be drafted for."""

    rate: float = 0.0
    """With drafts."""

    plain_rate: float = 0.0
    """Without."""

    @property
    def is_busy(self) -> bool:
        return self.rows > 0


@dataclass(frozen=True)
class Verifier:
    """Asks for a drafter."""

    name: str
    """Its replica's."""

    fingerprint: str = ""
    node: str = ""
    linked_to: str = ""
    """The drafter of the link that is up."""

    work: Work = Work()


@dataclass
class DrafterRegistry:
    """Keeps the tables. ``now``: seconds, of one clock."""

    members: dict[str, Member] = field(default_factory=dict)
    """By replica."""

    ends: dict[str, float] = field(default_factory=dict)
    """Replica -> when it counts as gone, unless it is heard from before."""

    verifiers: dict[str, Verifier] = field(default_factory=dict)
    """By name, as each asked last."""

    links: dict[str, LinkReport] = field(default_factory=dict)
    """By verifier."""

    assigned: dict[str, str] = field(default_factory=dict)
    """Verifier -> drafter."""

    granted: dict[str, str] = field(default_factory=dict)
    """Verifier -> the drafter of its last grant: a lent one where it is not the assigned one."""

    epoch: int = 0
    _settled_at: float = -math.inf

    def renew(self, member: Member, lasts_s: float, now: float) -> None:
        self.ends[member.replica] = now + lasts_s
        known = self.members.get(member.replica)
        # A replica that drains goes, whatever a heartbeat says that was sent before.
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
        """Has everyone leave a replica's drafter. Returns the verifiers linked to it that have another to go to."""
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
        # Another replica's own drafter steps in where the pool has none.
        ordered = sorted(staying, key=lambda each: (not each.pooled, *_order(each, verifier, loads)))
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
        if verifier.linked_to and verifier.linked_to not in drafters:  # its replica has not told a new registry yet
            self.assigned.pop(verifier.name, None)
            return Assignment(verifier.linked_to)
        drafter = self._own(verifier.name) or self._of_pool(verifier, now)
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

    def _of_pool(self, verifier: Verifier, now: float) -> str | None:
        """Chooses for a verifier that has no drafter of its own. A move costs the new drafter a reading of every
        running request's text, so there is one only to a drafter that nobody uses, and only from the fullest."""
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
        """Corrects what is known of its link: its last report may have been lost, or told to another registry."""
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
