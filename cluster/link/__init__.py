"""The link between one verifier and one drafter."""

from outrider.cluster.link.frame import FrameError
from outrider.cluster.link.link import HANG, Link, LinkBroken, LinkCounters, PingStats, Received
from outrider.cluster.link.rendezvous import LinkInvitation, host_link, join_link
from outrider.cluster.link.wire import LinkError, Wire, WireError

__all__ = [
    "HANG",
    "FrameError",
    "Link",
    "LinkBroken",
    "LinkCounters",
    "LinkError",
    "LinkInvitation",
    "PingStats",
    "Received",
    "Wire",
    "WireError",
    "host_link",
    "join_link",
]
