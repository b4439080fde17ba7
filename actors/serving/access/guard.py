"""Whether a call may come in: the key it shows, the key's scopes, and its limits.

Every proxy asks its own guard before it reads a message or a body, and the ingress asks once more: a proxy that was
started without one lets nobody in. A proxy's also charges callers for what is refused of theirs, with keys or without
(outrider.actors.serving.access.budget). Refusals are counted by key, as the file names it, and told in the log, never
with what the caller sent as its key.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime

import grpc

from outrider.actors.serving.access.budget import FAULTS, Bill, Budget, Payer
from outrider.actors.serving.access.files import Reloading
from outrider.actors.serving.access.keys import SCOPES, Key, KeyRing, Scope
from outrider.actors.serving.access.limits import LimitReached, Limits
from outrider.actors.serving.connections import address_of, address_of_call, peer_of
from outrider.actors.serving.failures import CallFailure, Refusal

logger = logging.getLogger("ray.serve.outrider.access")

NOBODY = "-"
"""In place of a key's name where no key was recognised. No key can have this name."""

LINES_A_SECOND = 50
"""Refusals that are logged one by one; of more the log gets their number."""

_MOST_SHOWN = 100
_BEARER = "bearer "

_OPEN: frozenset[Scope] = frozenset()
_GENERATE: frozenset[Scope] = frozenset({"generate"})
_STATUS: frozenset[Scope] = frozenset({"status"})
_ADMIN: frozenset[Scope] = frozenset({"admin"})
_EITHER: frozenset[Scope] = frozenset({"generate", "status"})


@dataclass(frozen=True)
class Need:
    """What a call takes. scopes: one of them is enough; none: no key is asked for. generates: it uses tokens.
    is_limited: it counts towards its key's limits."""

    scopes: frozenset[Scope]
    generates: bool = False
    is_limited: bool = True


OPEN = Need(_OPEN)
OTHER = Need(_EITHER)
"""Of what is not named below, served or not."""

GRPC_CALLS = {
    "/outrider.v1.GenerationService/Generate": Need(_GENERATE, generates=True),
    "/outrider.v1.GenerationService/GenerateStream": Need(_GENERATE, generates=True),
    # Whoever has used up what it may can still end what it has begun.
    "/outrider.v1.GenerationService/AbortRequest": Need(_GENERATE, is_limited=False),
    "/outrider.v1.GenerationService/Tokenize": Need(_GENERATE),
    "/outrider.v1.GenerationService/Detokenize": Need(_GENERATE),
    "/outrider.v1.GenerationService/GetServerStatus": Need(_STATUS),
    "/outrider.v1.GenerationService/RevertDrafter": Need(_ADMIN),
    "/grpc.health.v1.Health/Check": OPEN,
    # What tells of the server rather than of one's requests.
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": Need(_STATUS),
    "/ray.serve.RayServeAPIService/ListApplications": Need(_STATUS),
    "/ray.serve.RayServeAPIService/Healthz": Need(_STATUS),
}
"""By path. Of the health service's calls, Check alone costs nothing that is worth guarding. Serve's own is no standard
that probes know."""

HTTP_CALLS = {
    "/v1/chat/completions": Need(_GENERATE, generates=True),
    "/v1/completions": Need(_GENERATE, generates=True),
    "/v1/responses": Need(_GENERATE, generates=True),
    "/outrider/v1/stream": Need(_GENERATE, generates=True),
    "/outrider/v1/token_texts": Need(_GENERATE),
    "/v1/load_lora_adapter": Need(_ADMIN),
    "/v1/unload_lora_adapter": Need(_ADMIN),
    "/tokenize": Need(_GENERATE),
    "/detokenize": Need(_GENERATE),
    "/outrider/v1/status": Need(_STATUS),
    "/metrics": Need(_STATUS),
    "/-/routes": Need(_STATUS),
    "/-/healthz": OPEN,
    "/health": OPEN,
    "/livez": OPEN,
    "/readyz": OPEN,
    "/ping": OPEN,
    "/": OPEN,
}
"""By path; the open ones for who reads them. The page's own files say nothing; what the page then asks for takes a
key."""

PAGE = "/outrider/page/"


def need_of_rpc(name: str) -> Need:
    """name: of the RPC, which no other service's RPC has, or its path."""
    ends = f"/{name.rpartition('/')[2]}"
    return next((need for path, need in GRPC_CALLS.items() if path.endswith(ends)), OTHER)


OPEN_POST = "/ping"
"""What is open is so to who reads it, and this to a POST too, as platforms probe it. Its body is not read."""


def need_of_http(method: str, path: str, *, behind_prefix: bool = False) -> Need:
    """behind_prefix: something may stand before the paths that are known here, as in a proxy. The ingress knows."""
    need = _need_of_path(path, behind_prefix)
    reads = method in ("GET", "HEAD") or (method == "POST" and path.endswith(OPEN_POST))
    return need if reads or need is not OPEN else OTHER


def _need_of_path(path: str, behind_prefix: bool) -> Need:
    if (need := HTTP_CALLS.get(path)) is not None:
        return need
    if path.startswith(PAGE) and ".." not in path:
        return OPEN
    if behind_prefix:
        if PAGE in path and ".." not in path:
            return OPEN
        return next((need for end, need in HTTP_CALLS.items() if end != "/" and path.endswith(end)), OTHER)
    return OTHER


@dataclass(frozen=True)
class Asked:
    """A call, as far as a guard looks at it. authorization: the header; peer: as gRPC names it, or ``host:port``."""

    api: str
    name: str
    authorization: str | None
    peer: str
    need: Need

    @property
    def address(self) -> str:
        """Whom it counts for where no key is known."""
        host, _, port = self.peer.rpartition(":")
        address = address_of_call(self.peer) or address_of(host, int(port) if port.isdigit() else 0)
        return peer_of(address)


class Refused(Refusal):
    """reason: for programs and metrics. key: its name, or NOBODY."""

    def __init__(
        self,
        code: grpc.StatusCode,
        reason: str,
        sentence: str,
        key: str = NOBODY,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(sentence)
        self.code, self.reason, self.sentence, self.key = code, reason, sentence, key
        self.retry_after_s = retry_after_s

    def failure(self) -> CallFailure:
        retry_after_s = max(1, math.ceil(self.retry_after_s or 0))
        return CallFailure(self.code, self.sentence, self.reason, retry_after_s=retry_after_s)


def http_headers(refused: Refused) -> dict[str, str]:
    """Of a response that tells of it."""
    if refused.code is grpc.StatusCode.UNAUTHENTICATED:
        return {"WWW-Authenticate": "Bearer"}
    if refused.code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return {"Retry-After": str(refused.failure().retry_after_s)}
    return {}


class Caller:
    """A call that was let in."""

    def __init__(self, key: Key, guard: Guard) -> None:
        self.key, self._guard = key, guard

    @property
    def is_admin(self) -> bool:
        return "admin" in self.key.scopes

    def used(self, prompt_tokens: int = 0, completion_tokens: int = 0) -> None:
        self._guard.count_tokens(self.key, prompt_tokens, completion_tokens)


CALLER: ContextVar[Caller | None] = ContextVar("whose call this task answers", default=None)
"""None: the call needed no key, or none are asked for here."""


def key_of_caller() -> str | None:
    """The name of the key whose call this task answers."""
    caller = CALLER.get()
    return None if caller is None else caller.key.name


def caller_at(peer: str) -> str:
    """Whose call this task answers, to tell callers apart: its key, or peer where it came in with none."""
    key = key_of_caller()
    return peer if key is None else f"key {key}"


class Guard:
    """Of one process. For its event loop."""

    def __init__(
        self,
        keys: Reloading[KeyRing] | None,
        *,
        budget: Budget | None = None,
        parts: int = 1,
        on_refusal: Callable[[str, str, str], None] = lambda api, key, reason: None,
        on_request: Callable[[str], None] = lambda key: None,
        on_tokens: Callable[[str, int, int], None] = lambda key, prompt, completion: None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """keys None: none are asked for. budget None: what is refused is not charged. parts: of processes that keep
        keys' limits between them. on_refusal(api, key, reason),
        on_request(key), on_tokens(key, prompt, completion): for metrics."""
        self._keys, self._budget, self._clock, self._now = keys, budget, clock, now
        self._limits = Limits(clock, parts)
        self._on_refusal, self._on_request, self._on_tokens = on_refusal, on_request, on_tokens
        self._second, self._lines, self._unsaid = 0, 0, 0

    @property
    def charges(self) -> bool:
        return self._budget is not None

    @contextmanager
    def admit(self, asked: Asked, bill: Bill | None = None) -> Iterator[Caller | None]:
        """Around a call, which CALLER then tells whose it is. None: it needs no key. bill: gets its payer, and is to be
        charged if the call ends by its caller's fault. Raises Refused, and charges for that itself."""
        if self._budget is None and (self._keys is None or not asked.need.scopes):
            yield None
            return
        payer, running = None, ExitStack()
        try:
            key = self._found(asked)
            payer = self._payer(asked, key)
            if self._keys is not None and asked.need.scopes:
                key = self._checked(asked, key)
                running = self._begun(key, asked.need)
        except Refused as refused:
            if payer is not None and refused.code in FAULTS:
                self._charge(payer, Bill(is_whole=True).cost_s())
            self._tell(asked, refused)
            raise
        if bill is not None:
            bill.payer = payer
        if key is None:
            yield None
            return
        self._on_request(key.name)
        caller = Caller(key, self)
        before = CALLER.set(caller)
        try:
            yield caller
        finally:
            running.close()
            with suppress(ValueError):  # a generator that was left to the collector ends in another context
                CALLER.reset(before)

    def charge(self, bill: Bill) -> None:
        """For a call that was let in."""
        if bill.payer is not None:
            self._charge(bill.payer, bill.cost_s())

    def _charge(self, payer: Payer, cost_s: float) -> None:
        if self._budget is not None:
            self._budget.charge(payer, cost_s)

    def _payer(self, asked: Asked, key: Key | None) -> Payer | None:
        """Who the call is charged to, with or without a good key. Raises Refused where that one has overdrawn."""
        if self._budget is None:
            return None
        if key is not None:
            payer = Payer("key", key.name)
        else:
            payer = Payer("address" if asked.need.scopes else "open", asked.address)
        # What a key has begun it can end; how often it tries is held by the lane of aborts.
        may_go_on = key is not None and not asked.need.is_limited
        if not may_go_on and (wait_s := self._budget.wait_s(payer)) > 0:
            raise _too_often(wait_s, key)
        return payer

    def _begun(self, key: Key, need: Need) -> ExitStack:
        """To be closed when the call has ended. Raises Refused."""
        running = ExitStack()
        if need.is_limited:
            try:
                running.enter_context(self._limits.running(key, generates=need.generates))
            except LimitReached as reached:
                raise _over(reached, key) from None
        return running

    def count_tokens(self, key: Key, prompt: int, completion: int) -> None:
        self._limits.count_tokens(key, prompt + completion)
        self._on_tokens(key.name, prompt, completion)

    def _found(self, asked: Asked) -> Key | None:
        """The key that is shown, good for the call or not. None: no known one is, or none is needed."""
        header = asked.authorization
        if self._keys is None or not header or not asked.need.scopes:
            return None
        secret = header[len(_BEARER) :].strip() if header[: len(_BEARER)].lower() == _BEARER else ""
        return self._keys.current().find(secret.encode("utf-8", "replace"))

    def _checked(self, asked: Asked, key: Key | None) -> Key:
        """key: as found. Raises Refused."""
        unauthenticated = grpc.StatusCode.UNAUTHENTICATED
        if not asked.authorization:
            sentence = "authorization: no key was sent; send 'authorization: Bearer KEY'"
            raise Refused(unauthenticated, "NO_KEY", sentence)
        if key is None:
            sentence = "authorization: is no key that is known here; send 'authorization: Bearer KEY'"
            raise Refused(unauthenticated, "WRONG_KEY", sentence)
        if key.is_expired(self._now()):
            sentence = "authorization: the key has expired; ask for a new one"
            raise Refused(unauthenticated, "KEY_EXPIRED", sentence, key.name)
        if not ("admin" in key.scopes or asked.need.scopes.intersection(key.scopes)):
            wanted = " or ".join(scope for scope in SCOPES if scope in asked.need.scopes)
            sentence = f"authorization: the key lacks the scope {wanted} for this call; ask for one that has it"
            raise Refused(grpc.StatusCode.PERMISSION_DENIED, "SCOPE_MISSING", sentence, key.name)
        return key

    def _tell(self, asked: Asked, refused: Refused) -> None:
        self._on_refusal(asked.api, refused.key, refused.reason)
        second = int(self._clock())
        if second != self._second:
            if self._unsaid:
                logger.warning("refused: %d more that are not told one by one", self._unsaid)
            self._second, self._lines, self._unsaid = second, 0, 0
        if self._lines == LINES_A_SECOND:
            self._unsaid += 1
            return
        self._lines += 1
        logger.warning(
            "refused: reason=%s key=%s api=%s call=%s peer=%s",
            refused.reason,
            refused.key,
            asked.api,
            _shown(asked.name),
            _shown(asked.peer),
        )


def _over(reached: LimitReached, key: Key) -> Refused:
    when = "when one of them has ended" if reached.retry_after_s is None else f"in {reached.retry_after_s:.0f} s"
    sentence = f"authorization: the key's {reached.limit} ({reached.most}) are used up; retry {when}"
    return Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, reached.limit.upper(), sentence, key.name, reached.retry_after_s)


def _too_often(wait_s: float, key: Key | None) -> Refused:
    whose, name = ("this address", NOBODY) if key is None else ("this key", key.name)
    sentence = (
        f"too much of what {whose} sent was refused (limits.refused_seconds_per_minute); "
        f"mend what the refusals named, and retry in {max(1, math.ceil(wait_s))} s"
    )
    return Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "REFUSED_TOO_OFTEN", sentence, name, wait_s)


def _shown(text: str) -> str:
    """What a caller chose, on one line."""
    return "".join(c if c.isprintable() and c != " " else "?" for c in text[:_MOST_SHOWN]) or NOBODY
