"""Keeps one verifier linked to a drafter: asks the registry, invites, pings, and does it again when the link breaks.

Runs in the verifier's process as one control thread. vLLM's Ray workers never answer Ray calls, so this thread calls
out, to the named registry and drafter actors. Nothing here is on the path of a round.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import ray

from outrider.cluster.config import ConfigError, DraftModelConfig, OutriderConfig
from outrider.cluster.drafter_registry import LinkGrant, LinkReport, Verifier, Work, fingerprint
from outrider.cluster.link import Link, LinkError, LinkInvitation, host_link
from outrider.cluster.link.rendezvous import check_device
from outrider.cluster.placement import NAMESPACE
from outrider.cluster.vocabulary import marks_of

logger = logging.getLogger(__name__)

_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.2, 2.0
_CONNECT_TIMEOUT_S = 10.0
_WATCH_S = 0.2
_READY_TIMEOUT_S = 10.0
_READY_AMONG_OTHERS_S = 2.0
"""Used instead where another drafter may be asked."""

_LOOK_S = 1.0

FAILBACK_S = 2.0
"""How long the assigned drafter must have answered every look before a verifier leaves another one for it."""


@dataclass(frozen=True)
class ReplicaIdentity:
    replica: str
    """The replica's name in the registry; also its verifier's."""

    registry: str
    """Name of the registry actor."""


class LinkKeeper:
    """Keeps one verifier linked. `on_link` is called, on the keeper's thread, with every link that comes up."""

    def __init__(
        self,
        config: OutriderConfig,
        identity: ReplicaIdentity,
        *,
        vocab_size: int,
        decode: Callable[[Any], Sequence[Any]],
        on_link: Callable[[Link], None],
        device: str | None = None,
        work: Callable[[], Work] = Work,
    ) -> None:
        """Make a keeper that does nothing before `start`.

        Raises ConfigError for a link.backend that this process cannot have.

        Args:
            device: the rank's device, for a link that moves its memory.
            work: returns what the target does now; called on any thread.
        """
        try:
            check_device(config.link.backend)
        except LinkError as error:
            raise ConfigError(f"link.backend: {error}") from None
        self._work = work
        self._config, self._identity = config, identity
        self._vocab_size, self._decode = vocab_size, decode
        self._on_link, self._device = on_link, device
        self._fingerprint = fingerprint(config)
        self._vocabulary = marks_of(config.target.model) if isinstance(config.drafter, DraftModelConfig) else ()
        self._pooled = config.remote_drafter is not None and config.remote_drafter.pooled
        self._node = ""
        self._ready: dict[str, Any] = {}
        """By drafter, a call of its `ready` that is not answered yet. A stopped one is asked once, not at each try."""

        self._stopping = threading.Event()
        self._broken = threading.Event()
        self._link: Link | None = None
        self._ready_since = math.inf
        """Since when the assigned drafter has answered, while another one serves."""

        self._look_at = 0.0
        self._report = LinkReport(state="connecting")
        self._given_up = ""
        self._said = ""
        self._registry: Any = None
        self._thread = threading.Thread(target=self._run, name="link-keeper", daemon=True)

    def start(self) -> None:
        """Start the control thread; returns at once."""
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._broken.set()
        if self._link is not None:
            self._link.close("verifier stops")
            self._link.join()

    def status(self) -> dict[str, Any]:
        link = self._link
        traffic = {} if link is None else asdict(link.counters)
        return {**asdict(self._report), **traffic}

    def _run(self) -> None:
        unreachable: set[str] = set()
        retry_s = _FIRST_RETRY_S
        while not self._stopping.is_set():
            grant: LinkGrant | None = None
            try:
                grant = self._ask_registry("grant", self._verifier(), unreachable, self._report.epoch)
                if grant is None:
                    raise LinkError("no drafter is registered yet")
                if grant.drafter in unreachable:
                    unreachable.clear()  # all of them were: they are tried in turn again
                link = self._connect(grant)
            except Exception as error:  # noqa: BLE001 - whatever it is, the next try may do better, and no try never
                if grant is not None:
                    unreachable.add(grant.drafter)
                self._note_failure(error)
                self._stopping.wait(retry_s)
                retry_s = min(retry_s * 2, _LONGEST_RETRY_S)
                continue
            unreachable.clear()
            retry_s = _FIRST_RETRY_S
            while (another := self._serve(link, grant.drafter)) is not None:
                link, grant = another

    def _verifier(self, linked_to: str = "") -> Verifier:
        self._node = self._node or ray.get_runtime_context().get_node_id()
        return Verifier(self._identity.replica, self._fingerprint, self._node, linked_to, self._work())

    def _connect(self, grant: LinkGrant) -> Link:
        config = self._config.link
        # Processes of one Ray node share a file system, whatever containers run on the machine.
        is_near = self._wait_until_ready(grant) == self._node
        host = None if is_near else ray.util.get_node_ip_address()
        address, complete = host_link(host, config.backend, self._device)
        invitation = LinkInvitation(
            address=address,
            epoch=grant.epoch,
            link_deadline_ms=config.link_deadline_ms,
            vocab_size=self._vocab_size,
            num_speculative_tokens=self._config.num_speculative_tokens,
            verifier_id=self._identity.replica,
            vocabulary=self._vocabulary,
        )
        drafter = ray.get_actor(grant.drafter, namespace=NAMESPACE)
        joining = drafter.accept_link.remote(invitation, _CONNECT_TIMEOUT_S)
        try:
            wire = complete(_CONNECT_TIMEOUT_S)
        except LinkError:
            if ray.wait([joining], timeout=0)[0]:
                ray.get(joining)  # the drafter's own reason says more than our waiting in vain
            raise
        self._broken.clear()
        link = Link(
            wire,
            epoch=grant.epoch,
            link_deadline_s=config.link_deadline_ms / 1e3,
            decode=self._decode,
            name=f"{self._identity.replica}->{grant.drafter}",
            on_broken=lambda reason: self._broken.set(),
        )
        link.start()
        try:
            ray.get(joining, timeout=_CONNECT_TIMEOUT_S)
            rtt_us = link.ping(16, timeout_s=_CONNECT_TIMEOUT_S)
        except BaseException:
            link.abort("start-up failed")
            raise
        reconnects = self._report.reconnects + (self._report.epoch > 0)
        self._report = LinkReport("up", grant.epoch, grant.drafter, reconnects, rtt_us, self._given_up, wire.backend)
        up = "link to %s is up: epoch %d, %s, round trip median %.0f us"
        logger.info(up, grant.drafter, grant.epoch, wire.backend, rtt_us)
        return link

    def _wait_until_ready(self, grant: LinkGrant) -> str:
        """Return the drafter's node, once its model is loaded.

        Raises LinkError when it does not answer for a while: to invite a drafter that is stopped or still loading would
        only pile up invitations.
        """
        name = grant.drafter
        question = self._question(name)
        deadline = time.monotonic() + (_READY_AMONG_OTHERS_S if grant.has_others else _READY_TIMEOUT_S)
        while not ray.wait([question], timeout=_WATCH_S)[0]:
            if self._stopping.is_set() or time.monotonic() > deadline:
                raise LinkError(f"{name} is stopped or still loading")
        node: str = ray.get(self._ready.pop(name))
        return node

    def _serve(self, link: Link, drafter: str) -> tuple[Link, LinkGrant] | None:
        """Hand the link over and sleep until it breaks.

        Returns the link that is to take its place before that, if there is one, not handed over yet.
        """
        self._link = link
        self._look_at, self._ready_since = time.monotonic() + _LOOK_S, math.inf
        self._on_link(link)
        self._tell_registry()
        while link.broken is None and not self._stopping.is_set():
            self._broken.wait(_LOOK_S)
            self._broken.clear()
            if link.broken is None and (another := self._another(drafter)) is not None:
                return another
        if not self._stopping.is_set():
            self._given_up = link.broken or ""
            self._report = replace(self._report, state="down", last_error=self._given_up, backend="")
            logger.warning("link of epoch %d is down: %s", self._report.epoch, link.broken)
            self._tell_registry()
        return None

    def _another(self, drafter: str) -> tuple[Link, LinkGrant] | None:
        """Return a link to the assigned drafter, once that has been ready for a while; None where that one serves.

        The link that is up goes on until the verifier's requests have moved to the new one.
        """
        now = time.monotonic()
        if self._stopping.is_set() or now < self._look_at:
            return None
        self._look_at = now + _LOOK_S
        try:
            assignment = self._ask_registry("assigned_to", self._verifier(drafter))
            assigned = assignment.drafter
            if assigned == drafter and not self._pooled:
                self._look_at = math.inf  # its own stays the one
            if assigned in (None, drafter):
                return None
            self._ready_since = min(self._ready_since, now) if self._is_ready(assigned) else math.inf
            if now - self._ready_since < (0.0 if assignment.at_once else FAILBACK_S):
                return None
            self._ready_since = math.inf
            grant = self._ask_registry("grant", self._verifier(drafter), set(), self._report.epoch)
        except (ray.exceptions.RayError, TimeoutError, ValueError):
            return None  # a new one is made within seconds
        if grant is None or grant.drafter != assigned:
            return None
        try:
            link = self._connect(grant)
        except Exception as error:  # noqa: BLE001 - the other drafter serves on
            self._note_failure(error)
            return None
        logger.info("from %s to %s, as assigned", drafter, assigned)
        return link, grant

    def _is_ready(self, name: str) -> bool:
        """Return whether the drafter has answered since the last check, and ask it again. Never waits."""
        try:
            question = self._question(name)
            if not ray.wait([question], timeout=0)[0]:
                return False
            ray.get(self._ready.pop(name))
            self._question(name)
        except (ValueError, ray.exceptions.RayError):
            return False
        return True

    def _question(self, name: str) -> Any:
        """Return the call of the drafter's `ready` that is out, or a new one."""
        if name not in self._ready:
            self._ready[name] = ray.get_actor(name, namespace=NAMESPACE).ready.remote()
        return self._ready[name]

    def _note_failure(self, error: Exception) -> None:
        cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) and error.cause is not None else error
        said = (str(cause).strip() or type(cause).__name__).splitlines()[0]
        if said != self._said:
            logger.warning("no link yet: %s", said)
            self._said = said
        if self._report.epoch == 0:
            self._report.last_error = said

    def _ask_registry(self, method: str, *args: Any) -> Any:
        if self._registry is None:
            self._registry = ray.get_actor(self._identity.registry, namespace=NAMESPACE)
        try:
            return ray.get(getattr(self._registry, method).remote(*args), timeout=_CONNECT_TIMEOUT_S)
        except ray.exceptions.RayError:
            self._registry = None  # restarted, perhaps as another actor: look it up again
            raise

    def _tell_registry(self) -> None:
        try:
            self._ask_registry("report", self._identity.replica, self._report)
        except (ray.exceptions.RayError, TimeoutError, ValueError) as error:
            logger.warning("registry not reachable: %s", error)
