"""Who is in the deployment, and who drafts for whom. Pure: the registry holds one ``Membership``.

A verifier whose replica owns a drafter is assigned that one. All others share those of the pool: evenly by number, then
the nearest, then the one with the fewest. An assignment stays until it is worth changing, and few change at a time: a
move costs the drafter that is moved to a reading of every running request's text.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace

from outrider.cluster.config import OutriderConfig
from outrider.cluster.link.frame import PROTOCOL_VERSION

MOVE_PAUSE_S = 5.0
"""Between two moves that only make the shares better, and after a verifier has come."""

RACK_LABEL = "rack"
ZONE_LABEL, REGION_LABEL = "ray.io/availability-zone", "ray.io/availability-region"
"""Ray's own node labels, which Kubernetes' topology becomes."""


@dataclass(frozen=True)
class Place:
    """Where a process runs. Empty: not known, and near nobody else."""

    node: str = ""
    rack: str = ""
    zone: str = ""
    region: str = ""

    @classmethod
    def of(cls, node: str, labels: Mapping[str, str]) -> Place:
        """labels: of the Ray node."""
        return cls(node, labels.get(RACK_LABEL, ""), labels.get(ZONE_LABEL, ""), labels.get(REGION_LABEL, ""))

    def distance(self, other: Place) -> int:
        """0: the same node; 1, 2, 3: the same rack, zone, region; 4: none of these."""
        pairs = ((self.node, other.node), (self.rack, other.rack), (self.zone, other.zone), (self.region, other.region))
        return next((index for index, (ours, theirs) in enumerate(pairs) if ours and ours == theirs), len(pairs))


def fingerprint(config: OutriderConfig) -> str:
    """Of what both ends of a link have to agree on: the two models and their tokens, how is drafted, and the protocol.
    A deployment that is replaced by another configuration has members of both for a while."""
    drafter, target = config.remote_drafter, config.target
    where = {"placement", "cores", "num_drafters", "autoscaling"}
    agreed = {
        "protocol": PROTOCOL_VERSION,
        "drafter": None if drafter is None else drafter.model_dump(mode="json", exclude=where),
        "speculation": config.speculation.model_dump(mode="json"),
        "target": [target.model, target.revision, target.tokenizer],
    }
    return hashlib.sha256(json.dumps(agreed, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class LinkGrant:
    """Permission to build one link. epoch is greater than that of every link granted before."""

    epoch: int
    drafter: str
    has_others: bool = False
    """There are drafters that are not known to be unreachable besides: this one need not be waited for."""


@dataclass(frozen=True)
class Assignment:
    """drafter: None: there is none. at_once: the one that the verifier has now is about to go."""

    drafter: str | None
    at_once: bool = False


@dataclass
class LinkReport:
    """What a verifier last said of its link. state: ``connecting``, ``up`` or ``down``."""

    state: str
    epoch: int = 0
    drafter: str = ""
    reconnects: int = 0
    rtt_us: float = 0.0
    last_error: str = ""


@dataclass(frozen=True)
class Member:
    """A replica, as it tells of itself with every lease."""

    replica: str
    drafter: str | None = None
    """The name of its drafter's actor; None: it has none."""

    pooled: bool = False
    """Its drafter is there for others: it has no verifier itself."""

    fingerprint: str = ""
    place: Place = Place()
    """Its drafter's."""

    draining: bool = False
    """It is about to go: nobody is assigned to its drafter any more."""


@dataclass(frozen=True)
class Work:
    """What a target does, tokens a second as its length controller expects them; 0: not known."""

    is_busy: bool = False
    """Requests run that may be drafted for."""

    rate: float = 0.0
    """With drafts."""

    plain_rate: float = 0.0
    """Without."""


@dataclass(frozen=True)
class Verifier:
    """Who asks for a drafter."""

    name: str
    """Its replica's."""

    fingerprint: str = ""
    place: Place = Place()
    linked_to: str = ""
    """The drafter of the link that is up."""

    work: Work = Work()


@dataclass
class Membership:
    """``now``: seconds, of one clock."""

    members: dict[str, Member] = field(default_factory=dict)
    """By replica."""

    leases: dict[str, float] = field(default_factory=dict)
    """Replica -> when its lease ends."""

    verifiers: dict[str, Verifier] = field(default_factory=dict)
    """Those that have asked, by name."""

    links: dict[str, LinkReport] = field(default_factory=dict)
    """By verifier."""

    assigned: dict[str, str] = field(default_factory=dict)
    """Verifier -> drafter."""

    epoch: int = 0
    _moved_at: float = -MOVE_PAUSE_S

    def renew(self, member: Member, lease_s: float, now: float) -> None:
        self.leases[member.replica] = now + lease_s
        known = self.members.get(member.replica)
        # Who drains goes, whatever a renewal says that was sent before.
        draining = member.draining or (known is not None and known.draining)
        self.members[member.replica] = replace(member, draining=draining)

    def expire(self, now: float) -> None:
        for replica in [name for name, end in self.leases.items() if end <= now]:
            self.leave(replica)
        for name in set(self.verifiers) - set(self.leases):
            self.leave(name)

    def leave(self, replica: str) -> None:
        for table in (self.leases, self.members, self.verifiers, self.links, self.assigned):
            table.pop(replica, None)

    def drain(self, replica: str, now: float) -> list[str]:
        """Its drafter is given up by whoever has it, before it goes. Returns the verifiers that are linked to it and
        have another to go to."""
        member = self.members.get(replica)
        if member is None or member.drafter is None:
            return []
        self.members[replica] = replace(member, draining=True)
        self.assign(now)
        return [name for name in self.users(member.drafter) if name in self.assigned]

    def users(self, drafter: str) -> list[str]:
        """Verifiers whose links to it are up."""
        return sorted(name for name, link in self.links.items() if link.drafter == drafter and link.state == "up")

    def grant(self, verifier: Verifier, unreachable: Container[str], last_epoch: int, now: float) -> LinkGrant | None:
        """The assigned drafter, or the next best where that one is unreachable. None when there is none at all.

        last_epoch: of the verifier's last link; a registry that was restarted has forgotten it. When all are
        unreachable the first is tried again.
        """
        self.assigned_to(verifier, now)
        candidates = self._in_order(verifier)
        if not candidates:
            return None
        self.epoch = max(self.epoch, last_epoch) + 1
        reachable = [name for name in candidates if name not in unreachable]
        return LinkGrant(self.epoch, (reachable or candidates)[0], len(reachable) > 1)

    def assigned_to(self, verifier: Verifier, now: float) -> Assignment:
        """Which drafter the verifier should have now."""
        linked_to = verifier.linked_to
        # A registry that was made anew moves nobody, and learns who is linked to whom.
        if linked_to and all(member.drafter != linked_to for member in self.members.values()):
            for table in (self.verifiers, self.assigned):
                table.pop(verifier.name, None)
            return Assignment(linked_to)
        if linked_to:
            self.assigned.setdefault(verifier.name, linked_to)
            self.links.setdefault(verifier.name, LinkReport("up", drafter=linked_to))
        if verifier.name not in self.verifiers:
            self._moved_at = now  # of a registry that was made anew: others have not asked yet
        self.verifiers[verifier.name] = verifier
        self.assign(now)
        going = any(member.drafter == linked_to for member in self.members.values() if member.draining)
        return Assignment(self.assigned.get(verifier.name), at_once=going)

    def assign(self, now: float) -> None:
        """Bring ``assigned`` up to date: drafters for those that have none, and at most one move for better shares."""
        shares = _Shares(self)
        for verifier in shares.sharing:
            if self.assigned.get(verifier.name) not in shares.pool(verifier):
                self.assigned.pop(verifier.name, None)
        waiting = [verifier for verifier in shares.sharing if verifier.name not in self.assigned]
        for verifier in waiting:
            if shares.pool(verifier):
                self.assigned[verifier.name] = shares.best(verifier)
        if not waiting and now - self._moved_at >= MOVE_PAUSE_S and (move := shares.best_move()) is not None:
            self.assigned[move[0]], self._moved_at = move[1], now
        for name in self.verifiers:
            if (own := self.own(name)) is not None:
                self.assigned[name] = own

    def own(self, verifier: str) -> str | None:
        """The drafter of the verifier's own replica."""
        member = self.members.get(verifier)
        return None if member is None or member.pooled else member.drafter

    def _in_order(self, verifier: Verifier) -> list[str]:
        """Everyone who can draft for it, the assigned one first, then its peers of the pool, then other replicas' own,
        which step in for one that is unreachable."""
        shares = _Shares(self)
        first: Iterable[str] = filter(None, [self.assigned.get(verifier.name)])
        pooled = sorted(shares.pool(verifier), key=lambda name: shares.cost(verifier, name))
        owned = [
            member.drafter
            for member in self.members.values()
            if member.drafter and not member.pooled and member.fingerprint == verifier.fingerprint
        ]
        others = sorted(owned, key=lambda name: (len(self.users(name)), name))
        return list(dict.fromkeys([*first, *pooled, *others]))


class _Shares:
    """What every drafter of the pools would cost every verifier, as it is now."""

    def __init__(self, members: Membership) -> None:
        self._assigned = members.assigned
        self._pools: dict[str, dict[str, Member]] = {}
        """By fingerprint, those that stay, by name."""

        for member in members.members.values():
            if member.drafter and member.pooled and not member.draining:
                self._pools.setdefault(member.fingerprint, {})[member.drafter] = member
        self.sharing = sorted(
            (each for each in members.verifiers.values() if members.own(each.name) is None),
            key=lambda each: each.name,
        )
        """Verifiers without a drafter of their own."""

        self._peers = Counter(verifier.fingerprint for verifier in self.sharing)

    def pool(self, verifier: Verifier) -> Mapping[str, Member]:
        """Drafters that may draft for it."""
        return self._pools.get(verifier.fingerprint, {})

    def best(self, verifier: Verifier) -> str:
        """Of its pool, which holds one at least."""
        loads = Counter(self._assigned.values())
        return min(self.pool(verifier), key=lambda name: self.cost(verifier, name, loads))

    def best_move(self) -> tuple[str, str] | None:
        """(verifier, drafter) of the move that gains most, if one does. All verifiers have a drafter, or no pool."""
        loads, gains = Counter(self._assigned.values()), []
        for verifier in self.sharing:
            if (current := self._assigned.get(verifier.name)) is None:
                continue
            costs = {name: self.cost(verifier, name, loads) for name in self.pool(verifier)}
            best = min(costs, key=lambda name: costs[name])
            # Names only break ties among equals: no reason to move.
            if costs[best][:-1] < costs[current][:-1]:
                gains.append((costs[current][:-1], verifier.name, best))
        return max(gains)[1:] if gains else None

    def cost(
        self, verifier: Verifier, drafter: str, loads: Mapping[str, int] | None = None
    ) -> tuple[int, int, int, str]:
        """How many targets beyond an even share it would have, how far it is, how many others it has; and its name.
        loads: verifiers by the drafter they are assigned."""
        loads = Counter(self._assigned.values()) if loads is None else loads
        others = loads.get(drafter, 0) - (self._assigned.get(verifier.name) == drafter)
        pool = self.pool(verifier)
        share = -(-self._peers[verifier.fingerprint] // len(pool))
        return max(others + 1 - share, 0), verifier.place.distance(pool[drafter].place), others, drafter


class Homing:
    """When a verifier that is linked to another drafter than the one it is assigned goes there. Pure.

    The other must have answered every look for a while; that while doubles each time it is left again soon after, so a
    drafter that dies of every link is not run to and from.
    """

    FIRST_S, LONGEST_S = 2.0, 300.0
    SETTLED_S = 60.0
    """A link at home that lasted so long was no mistake."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pause_s = self.FIRST_S
        self._ready_since: float | None = None
        self._came_home: float | None = None

    def look(self, ready: bool) -> bool:
        """While on another drafter: whether the assigned one answers now. Returns whether to go there."""
        now = self._clock()
        if not ready:
            self._ready_since = None
            return False
        if self._ready_since is None:
            self._ready_since = now
        return now - self._ready_since >= self._pause_s

    def went_home(self) -> None:
        self._came_home = self._clock()

    def link_ended(self) -> None:
        since, self._came_home, self._ready_since = self._came_home, None, None
        if since is not None and self._clock() - since >= self.SETTLED_S:
            self._pause_s = self.FIRST_S
        elif since is not None:
            self.failed()

    def failed(self) -> None:
        """It said that it is ready, and could not be linked to or was soon left."""
        self._ready_since = None
        self._pause_s = min(2 * self._pause_s, self.LONGEST_S)
