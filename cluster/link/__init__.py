"""The wire between one verifier (rank 0) and one drafter (rank 1)."""

from outrider.cluster.link.frame import HEADER_WORDS, FrameError
from outrider.cluster.link.link import (
    HANG,
    Link,
    LinkBroken,
    LinkCounters,
    LinkError,
    PingStats,
    Received,
    Transport,
    TransportClosed,
    TransportError,
    TransportTimeout,
)
from outrider.cluster.link.rendezvous import LinkInvitation, host_link, join_link

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
