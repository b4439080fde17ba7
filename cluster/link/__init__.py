"""The link between one verifier and one drafter."""

from outrider.cluster.link.link import Link, LinkBroken, LinkCounters, Received
from outrider.cluster.link.rendezvous import LinkAddress, LinkInvitation, host_link, join_link
from outrider.cluster.link.wire import LinkError, Wire, WireError

__all__ = [
    "Link",
    "LinkAddress",
    "LinkBroken",
    "LinkCounters",
    "LinkError",
    "LinkInvitation",
    "Received",
    "Wire",
    "WireError",
    "host_link",
    "join_link",
]
