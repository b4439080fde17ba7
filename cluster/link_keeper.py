"""Keeps one verifier linked to a drafter: asks the registry, invites, pings, and does it again when the link breaks.

Runs in the verifier's process as one control thread. vLLM's Ray workers never answer Ray calls, so this thread calls
out, to the named registry and drafter actors. Nothing here is on the path of a round.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import ray

from cluster.config import OutriderConfig
from cluster.link import Link, LinkError, host_link
from cluster.membership import LinkGrant, LinkReport
from cluster.ranks import NAMESPACE

logger = logging.getLogger(__name__)

_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.2, 2.0
_CONNECT_TIMEOUT_S = 10.0
_WATCH_S = 0.2

HANG = "drafter hangs"
"""How the reason of a link begins that was given up because its drafter lives but answers nothing."""

_HANGS_BEFORE_RESTART = 2


@dataclass(frozen=True)
class ReplicaIdentity:
    replica: str
    """The replica's name in the registry; also its verifier's."""

    registry: str
    """Name of the registry actor."""


class LinkKeeper:
    """start() returns at once; on_link is called, on the keeper's thread, with every link that comes up."""

    def __init__(
        self,
        config: OutriderConfig,
        identity: ReplicaIdentity,
        *,
        vocab_size: int,
        capacity_words: int,
        decode: Callable[[Any], Sequence[Any]],
        on_link: Callable[[Link], None],
    ) -> None:
        self._config, self._identity = config, identity
        self._vocab_size, self._capacity_words, self._decode = vocab_size, capacity_words, decode
        self._on_link = on_link
        self._stopping = threading.Event()
        self._broken = threading.Event()
        self._link: Link | None = None
        self._report = LinkReport(state="connecting")
        self._registry: Any = None
        self._thread = threading.Thread(target=self._run, name="link-keeper", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._broken.set()
        if self._link is not None:
            self._link.close("verifier stops")

    def status(self) -> dict[str, Any]:
        link = self._link
        traffic = {} if link is None else asdict(link.counters)
        return {**asdict(self._report), **traffic}

    def _run(self) -> None:
        unreachable: set[str] = set()
        retry_s = _FIRST_RETRY_S
        hangs = 0
        while not self._stopping.is_set():
            grant: LinkGrant | None = None
            try:
                grant = self._ask_registry("grant", self._identity.replica, unreachable)
                if grant is None:
                    raise LinkError("no drafter is registered yet")
                link = self._connect(grant)
            except (LinkError, ray.exceptions.RayError, TimeoutError, ValueError) as error:
                if grant is not None:
                    unreachable.add(grant.drafter)
                self._note_failure(str(error).strip().splitlines()[0])
                self._stopping.wait(retry_s)
                retry_s = min(retry_s * 2, _LONGEST_RETRY_S)
                continue
            unreachable.clear()
            retry_s = _FIRST_RETRY_S
            received = self._serve(link)
            hangs = hangs + 1 if HANG in (link.broken or "") and not received else 0
            if hangs >= _HANGS_BEFORE_RESTART:
                hangs = 0
                self._restart(grant.drafter)

    def _restart(self, drafter: str) -> None:
        """Kill a drafter whose loop is stuck; Ray starts a fresh one under the same name."""
        logger.error("%s answers nothing on %d links in a row: restarting it", drafter, _HANGS_BEFORE_RESTART)
        try:
            ray.kill(ray.get_actor(drafter, namespace=NAMESPACE), no_restart=False)
        except (ValueError, ray.exceptions.RayError) as error:
            logger.error("could not restart %s: %s", drafter, error)

    def _connect(self, grant: LinkGrant) -> Link:
        drafter = ray.get_actor(grant.drafter, namespace=NAMESPACE)
        # A drafter that is stopped or still loading answers late; inviting it before would only pile up invitations.
        ready = drafter.ready.remote()
        while not ray.wait([ready], timeout=1.0)[0]:
            if self._stopping.is_set():
                raise LinkError("verifier stops")
        host = ray.get(ready)
        invitation, complete = host_link(
            host=self._host_towards(host),
            epoch=grant.epoch,
            backend=self._backend(),
            capacity_words=self._capacity_words,
            round_deadline_ms=self._config.link.round_deadline_ms,
            link_deadline_ms=self._config.link.link_deadline_ms,
            vocab_size=self._vocab_size,
            num_speculative_tokens=self._config.num_speculative_tokens,
            verifier_id=self._identity.replica,
        )
        joining = drafter.accept_link.remote(invitation, _CONNECT_TIMEOUT_S)
        transport = complete(_CONNECT_TIMEOUT_S)
        self._broken.clear()
        link = Link(
            transport,
            epoch=grant.epoch,
            capacity_words=self._capacity_words,
            link_deadline_s=self._config.link.link_deadline_ms / 1e3,
            decode=self._decode,
            name=f"{self._identity.replica}->{grant.drafter}",
            on_broken=lambda reason: self._broken.set(),
        )
        link.start()
        try:
            ray.get(joining, timeout=_CONNECT_TIMEOUT_S)
            times = link.ping(16, timeout_s=_CONNECT_TIMEOUT_S)
        except BaseException:
            link.abort("start-up failed")
            raise
        reconnects = self._report.reconnects + (self._report.epoch > 0)
        self._report = LinkReport("up", grant.epoch, grant.drafter, reconnects, times.median_us)
        logger.info(
            "link to %s is up: epoch %d, %s, round trip median %.0f us (min %.0f, max %.0f)",
            grant.drafter, grant.epoch, self._backend(), times.median_us, times.min_us, times.max_us,
        )  # fmt: skip
        return link

    def _serve(self, link: Link) -> bool:
        """Hand the link over and sleep until it breaks. Returns whether anything but heartbeats came over it."""
        self._link = link
        self._on_link(link)
        self._tell_registry()
        while link.broken is None and not self._stopping.is_set():
            self._broken.wait(_WATCH_S)  # a link that this process aborts does not call on_broken
        if not self._stopping.is_set():
            self._report = LinkReport(
                "down", self._report.epoch, self._report.drafter, self._report.reconnects,
                self._report.rtt_us, link.broken or "",
            )  # fmt: skip
            logger.warning("link of epoch %d is down: %s", self._report.epoch, link.broken)
            self._tell_registry()
        return link.counters.data_frames_received > 0

    def _note_failure(self, error: str) -> None:
        if error != self._report.last_error:
            logger.warning("no link yet: %s", error)
            self._report.last_error = error

    def _backend(self) -> Literal["gloo", "nccl"]:
        backend = self._config.link.backend
        return "gloo" if backend == "auto" else backend

    @staticmethod
    def _host_towards(drafter_host: str) -> str:
        own = ray.util.get_node_ip_address()
        return "127.0.0.1" if own == drafter_host else own

    def _ask_registry(self, method: str, *args: Any) -> Any:
        if self._registry is None:
            self._registry = ray.get_actor(self._identity.registry, namespace=NAMESPACE)
        return ray.get(getattr(self._registry, method).remote(*args), timeout=_CONNECT_TIMEOUT_S)

    def _tell_registry(self) -> None:
        try:
            self._ask_registry("report", self._identity.replica, self._report)
        except (ray.exceptions.RayError, TimeoutError) as error:
            logger.warning("registry not reachable: %s", error)
