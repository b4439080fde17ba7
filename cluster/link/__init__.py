"""The wire between one verifier (rank 0) and one drafter (rank 1)."""

from outrider.cluster.link.frame import HEADER_WORDS, FrameError
from outrider.cluster.link.link import HANG, Link, LinkCounters, PingStats, Received
from outrider.cluster.link.rendezvous import LinkInvitation, host_link, join_link
from outrider.cluster.link.transport import (
    LinkBroken,
    LinkError,
    Transport,
    TransportClosed,
    TransportError,
    TransportTimeout,
)

__all__ = [
    "HANG",
    "HEADER_WORDS",
    "FrameError",
    "Link",
    "LinkBroken",
    "LinkCounters",
    "LinkError",
    "LinkInvitation",
    "PingStats",
    "Received",
    "Transport",
    "TransportClosed",
    "TransportError",
    "TransportTimeout",
    "host_link",
    "join_link",
]
