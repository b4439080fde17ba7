"""Who is in the deployment, and who drafts for whom. Pure: the registry holds one ``Membership``.

A verifier whose replica owns a drafter is assigned that one. All others share those of the pool: evenly by load, then
the nearest, then the one with the least. An assignment stays until it is worth changing, and few change at a time: a
move costs the drafter that is moved to a reading of every running request's text.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import deque
from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from statistics import median

from outrider.cluster.config import OutriderConfig
from outrider.cluster.link.frame import PROTOCOL_VERSION

MOVE_PAUSE_S = 5.0
"""Between two moves that only make the shares better, and after a verifier has come."""

LOOK_S = 1.0
"""Between two looks for such a move, however many verifiers ask."""

SMOOTHING_S = 30.0
"""Time constant of the exponential average of a verifier's rows: what lasts a few seconds moves nobody."""

TOLERANCE, HYSTERESIS = 1.05, 1.2
"""A nearer drafter may have so many times a fair share, for loads are never quite equal; one is left when it has so
many times what another would have."""

RTT_GAIN, RTT_GAIN_US = 2.0, 200.0
"""Of two drafters in the same place one is nearer when its round trip is so many times shorter, and by so much."""

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
    where = {"placement", "cores", "node_labels", "num_drafters", "autoscaling"}
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
    backend: str = ""
    """Of a link that is up: local, gloo, or one of backends.DEVICE_BACKENDS."""


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

    trouble: str = ""
    """Why its drafter is not there yet; empty: nothing has failed."""


@dataclass(frozen=True)
class Work:
    """What a target does, tokens a second as its length controller expects them; 0: not known."""

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
    """Who asks for a drafter."""

    name: str
    """Its replica's."""

    fingerprint: str = ""
    place: Place = Place()
    linked_to: str = ""
    """The drafter of the link that is up."""

    work: Work = Work()


class RoundTrips:
    """Round trips between nodes, in microseconds: of each pair the least of the last few, for a busy host only makes
    one longer. Of so many pairs; that which was measured longest ago is forgotten."""

    EACH, PAIRS = 4, 4096

    def __init__(self) -> None:
        self._measured: dict[tuple[str, str], deque[float]] = {}
        """By the verifier's node and the drafter's, the pair measured last at the end."""

    def add(self, verifier: Place, drafter: Place, rtt_us: float) -> None:
        if not (verifier.node and drafter.node and rtt_us > 0):
            return
        pair = verifier.node, drafter.node
        self._measured[pair] = deque([*self._measured.pop(pair, ()), rtt_us], self.EACH)
        if len(self._measured) > self.PAIRS:
            del self._measured[next(iter(self._measured))]

    def between(self, verifier: Place, drafter: Place) -> float | None:
        """None: no link has ever been up."""
        return min(self._measured.get((verifier.node, drafter.node), ()), default=None)


@dataclass
class Membership:
    """``now``: seconds, of one clock."""

    members: dict[str, Member] = field(default_factory=dict)
    """By replica."""

    leases: dict[str, float] = field(default_factory=dict)
    """Replica -> when its lease ends."""

    verifiers: dict[str, Verifier] = field(default_factory=dict)
    """Those that have asked, by name, but for those whose drafter is not known here."""

    works: dict[str, Work] = field(default_factory=dict)
    """By verifier, whatever it is linked to: what it last told of."""

    links: dict[str, LinkReport] = field(default_factory=dict)
    """By verifier."""

    assigned: dict[str, str] = field(default_factory=dict)
    """Verifier -> drafter."""

    granted: dict[str, str] = field(default_factory=dict)
    """Verifier -> the drafter that it was to link to last: another than the assigned one while that is unreachable."""

    round_trips: RoundTrips = field(default_factory=RoundTrips)
    rows: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Verifier -> its rows, smoothed, and when it last told of them."""

    epoch: int = 0
    _look_at: float = -math.inf
    """When a move is looked for next."""

    def renew(self, member: Member, lease_s: float, now: float) -> None:
        self.leases[member.replica] = now + lease_s
        known = self.members.get(member.replica)
        # Who drains goes, whatever a renewal says that was sent before.
        draining = member.draining or (known is not None and known.draining)
        self.members[member.replica] = replace(member, draining=draining)

    def expire(self, now: float) -> None:
        for replica in [name for name, end in self.leases.items() if end <= now]:
            self.leave(replica)
        for name in (self.works.keys() | self.links.keys()) - self.leases.keys():
            self.leave(name)

    def leave(self, replica: str) -> None:
        for table in (
            self.leases, self.members, self.verifiers, self.works, self.links, self.assigned, self.granted, self.rows
        ):  # fmt: skip
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

    def report(self, verifier: str, link: LinkReport) -> None:
        self.links[verifier] = link
        told = self.verifiers.get(verifier)
        drafter = next((member for member in self.members.values() if member.drafter == link.drafter), None)
        if link.state == "up" and told is not None and drafter is not None:
            self.round_trips.add(told.place, drafter.place, link.rtt_us)

    def users(self, drafter: str) -> list[str]:
        """Verifiers whose links to it are up."""
        return sorted(name for name, link in self.links.items() if link.drafter == drafter and link.state == "up")

    def grant(self, verifier: Verifier, unreachable: Container[str], last_epoch: int, now: float) -> LinkGrant | None:
        """The assigned drafter, or the next best where that one is unreachable. None when there is none at all.

        last_epoch: of the verifier's last link; a registry that was restarted has forgotten it. When all are
        unreachable the first is tried again.
        """
        self.assigned_to(verifier, now)
        candidates = self._in_order(verifier, unreachable)
        if not candidates:
            return None
        self.epoch = max(self.epoch, last_epoch) + 1
        reachable = [name for name in candidates if name not in unreachable]
        drafter = self.granted[verifier.name] = (reachable or candidates)[0]
        return LinkGrant(self.epoch, drafter, len(reachable) > 1)

    def assigned_to(self, verifier: Verifier, now: float) -> Assignment:
        """Which drafter the verifier should have now."""
        linked_to = verifier.linked_to
        self.works[verifier.name] = verifier.work
        self._know_link(verifier)
        # A registry that was made anew moves nobody, and learns who is linked to whom.
        if linked_to and all(member.drafter != linked_to for member in self.members.values()):
            for table in (self.verifiers, self.assigned):
                table.pop(verifier.name, None)
            return Assignment(linked_to)
        if linked_to:
            self.assigned.setdefault(verifier.name, linked_to)
        if verifier.name not in self.verifiers:
            self._look_at = now + MOVE_PAUSE_S  # of a registry that was made anew: others have not asked yet
        self.verifiers[verifier.name] = verifier
        self._smooth(verifier, now)
        self.assign(now)
        going = any(member.drafter == linked_to for member in self.members.values() if member.draining)
        return Assignment(self.assigned.get(verifier.name), at_once=going)

    def _know_link(self, verifier: Verifier) -> None:
        """Its last report may have been lost, or told to another registry."""
        known = self.links.get(verifier.name)
        of_link = known.drafter if known is not None and known.state == "up" else ""
        if verifier.linked_to and verifier.linked_to != of_link:
            self.links[verifier.name] = LinkReport("up", drafter=verifier.linked_to)
        elif known is not None and of_link and not verifier.linked_to:
            self.links[verifier.name] = replace(known, state="down")

    def assign(self, now: float) -> None:
        """Bring ``assigned`` up to date: drafters for those that have none, and at most one move for better shares."""
        shares = _Shares(self)
        for verifier in shares.sharing:
            if self.assigned.get(verifier.name) not in shares.pool(verifier):
                self.assigned.pop(verifier.name, None)
        waiting = [verifier for verifier in shares.sharing if verifier.name not in self.assigned]
        for verifier in waiting:
            if shares.pool(verifier):
                shares.assign(verifier)
        if not waiting and now >= self._look_at:
            self._look_at = now + LOOK_S
            if (move := shares.best_move()) is not None:
                self.assigned[move[0]], self._look_at = move[1], now + MOVE_PAUSE_S
        for name in self.verifiers:
            if (own := self.own(name)) is not None:
                self.assigned[name] = own

    def weight(self, verifier: str) -> float:
        """Of all its drafter has to do. One that idles counts as one row."""
        return 1.0 + self.rows.get(verifier, (0.0, 0.0))[0]

    def _smooth(self, verifier: Verifier, now: float) -> None:
        rows, told_at = self.rows.get(verifier.name, (verifier.work.rows, now))
        rows += (verifier.work.rows - rows) * (1 - math.exp((told_at - now) / SMOOTHING_S))
        self.rows[verifier.name] = rows, now

    def own(self, verifier: str) -> str | None:
        """The drafter of the verifier's own replica."""
        member = self.members.get(verifier)
        return None if member is None or member.pooled else member.drafter

    def _in_order(self, verifier: Verifier, unreachable: Container[str]) -> list[str]:
        """Everyone who can draft for it, the assigned one first, then its peers of the pool, then other replicas' own,
        which step in for one that is unreachable. Those who share one that is lost part among all others."""
        shares = _Shares(self)
        guests: dict[str, float] = {}
        for name, drafter in self.granted.items():
            if name != verifier.name and self.assigned.get(name) != drafter:
                guests[drafter] = guests.get(drafter, 0.0) + self.weight(name)
        first: Iterable[str] = filter(None, [self.assigned.get(verifier.name)])
        pooled = [*(offer.drafter for offer in shares.offers(verifier, unreachable, guests)), *shares.pool(verifier)]
        owned = [
            member.drafter
            for member in self.members.values()
            if member.drafter and not member.pooled and member.fingerprint == verifier.fingerprint
        ]
        others = sorted(owned, key=lambda name: (len(self.users(name)), name))
        return list(dict.fromkeys([*first, *pooled, *others]))


@dataclass(frozen=True)
class _Offer:
    """A drafter of a verifier's pool, as it would be with that verifier."""

    drafter: str
    load: float
    """Of all its verifiers, that one among them."""

    is_crowded: bool
    """More than a fair share, and another would have less."""

    distance: int
    """See Place.distance."""

    rtt_us: float | None
    """None: not known."""

    def is_nearer_than(self, other: _Offer) -> bool:
        if self.distance != other.distance or self.rtt_us is None or other.rtt_us is None:
            return self.distance < other.distance
        return self.rtt_us < min(other.rtt_us / RTT_GAIN, other.rtt_us - RTT_GAIN_US)


class _Shares:
    """What every drafter of the pools would be to every verifier, as it is now. Loads are sums of weights.

    While weights stay, moves have an end. Each lowers the first that it changes of these sums: the squares of loads,
    none taken for less than TOLERANCE fair shares; distances; those squares, none taken for less than a fair share;
    round trips.
    """

    def __init__(self, members: Membership) -> None:
        self._assigned, self._round_trips = members.assigned, members.round_trips
        self._weight = members.weight
        self._pools: dict[str, dict[str, Member]] = {}
        """By fingerprint, those that stay, by name."""

        for member in members.members.values():
            if member.drafter and member.pooled and not member.draining:
                self._pools.setdefault(member.fingerprint, {})[member.drafter] = member
        self.sharing = sorted(
            (each for each in members.verifiers.values() if members.own(each.name) is None),
            key=lambda each: (-self._weight(each.name), each.name),
        )
        """Verifiers without a drafter of their own. The heaviest first: the light ones even out what is left."""

        self._loads = {name: 0.0 for pool in self._pools.values() for name in pool}
        weights: dict[str, list[float]] = {}
        for verifier in self.sharing:
            weight = self._weight(verifier.name)
            weights.setdefault(verifier.fingerprint, []).append(weight)
            current = self._assigned.get(verifier.name, "")
            if current in self.pool(verifier):
                self._loads[current] += weight
        self._fair = {name: fair_share(each, len(self._pools.get(name, ()))) for name, each in weights.items()}
        """By fingerprint."""

    def pool(self, verifier: Verifier) -> Mapping[str, Member]:
        """Drafters that may draft for it."""
        return self._pools.get(verifier.fingerprint, {})

    def assign(self, verifier: Verifier) -> None:
        """The best of its pool, which holds one at least, to one that has none."""
        best = self.offers(verifier)[0]
        self._assigned[verifier.name], self._loads[best.drafter] = best.drafter, best.load

    def best_move(self) -> tuple[str, str] | None:
        """(verifier, drafter) of the move that gains most, if one does: away from the fullest drafter; then the one
        that shortens the way most, then the one that takes most. All verifiers have a drafter, or no pool."""
        moves = []
        for verifier in self.sharing:
            fair, offers = self._fair[verifier.fingerprint], self.offers(verifier)
            now = next((offer for offer in offers if offer.drafter == self._assigned.get(verifier.name)), None)
            then = now and next((offer for offer in offers if _pays(now, offer, fair)), None)
            if now is not None and then is not None:
                relief = min(self._weight(verifier.name), now.load - then.load)
                excess = max(now.load - fair, 0.0) if relief > 0 else 0.0
                moves.append((excess, now.distance - then.distance, relief, verifier.name, then.drafter))
        return max(moves)[-2:] if moves else None

    def offers(
        self, verifier: Verifier, unreachable: Container[str] = (), guests: Mapping[str, float] | None = None
    ) -> list[_Offer]:
        """Its pool, in the order in which one that has none would take them. Round trips are told apart by powers of
        two; one that is not known counts as the median of those that are, at the same distance. guests: what drafters
        have beside those whom they are assigned to."""
        pool = {name: member for name, member in self.pool(verifier).items() if name not in unreachable}
        weight, current = self._weight(verifier.name), self._assigned.get(verifier.name)
        loads = {name: self._loads[name] + (weight if name != current else 0.0) for name in pool}
        for name, load in (guests or {}).items():
            if name in loads:
                loads[name] += load
        most = max(TOLERANCE * self._fair.get(verifier.fingerprint, 0.0), min(loads.values(), default=0.0))
        offers = []
        known: dict[int, list[float]] = {}
        for name, load in loads.items():
            place = pool[name].place
            distance, rtt_us = verifier.place.distance(place), self._round_trips.between(verifier.place, place)
            offers.append(_Offer(name, load, load > most, distance, rtt_us))
            if rtt_us is not None:
                known.setdefault(distance, []).append(rtt_us)

        def order(offer: _Offer) -> tuple[bool, int, int, float, str]:
            rtt_us = offer.rtt_us or median(known.get(offer.distance, [1.0]))
            return offer.is_crowded, offer.distance, math.floor(math.log2(rtt_us)), offer.load, offer.drafter

        return sorted(offers, key=order)


def _pays(now: _Offer, then: _Offer, fair: float) -> bool:
    """Whether a verifier moves. fair: a fair share of its pool's load."""
    if then.is_nearer_than(now):
        # What only answers sooner gets no more than a fair share, or moves might have no end.
        room = fair * (TOLERANCE if then.distance < now.distance else 1.0)
        return then.load <= max(room, now.load)
    if now.is_nearer_than(then):
        return now.load > HYSTERESIS * max(fair, then.load)
    return now.load > max(fair, HYSTERESIS * then.load)


def fair_share(weights: Collection[float], num_drafters: int) -> float:
    """Of the load, where no weight can be split: who alone has more than the rest's share has a drafter to itself.
    0 where there is none."""
    rest, left = sum(weights), num_drafters
    for weight in sorted(weights, reverse=True):
        if left <= 1 or weight * left <= rest:
            break
        rest, left = rest - weight, left - 1
    return rest / left if left else 0.0
