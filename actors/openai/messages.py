"""What the HTTP front asks of a target replica, and what it gets back: a head, then the body in parts.

Free of vLLM: the ingress loads this.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from actors.deadlines import Deadline

Endpoint = Literal["chat", "completions", "tokenize", "detokenize", "models", "openapi"]
"""``/v1/chat/completions``, ``/v1/completions``, ``/tokenize``, ``/detokenize``, ``/v1/models``, ``/openapi.json``."""


@dataclass(frozen=True)
class OpenAIRequest:
    """A request whose fields have been checked by name (see actors.http.door). Values are vLLM's to check."""

    endpoint: Endpoint
    request_id: str
    body: dict[str, Any] = field(default_factory=dict)
    """Decoded JSON in vLLM's schema, without fields of ours."""

    round_options: dict[str, Any] = field(default_factory=dict)
    """What goes under EXTRA_ARGS_KEY into SamplingParams.extra_args: see actors.round_settings."""

    trace_headers: dict[str, str] = field(default_factory=dict)
    """``traceparent``, ``tracestate`` of the caller."""

    avoid_replicas: tuple[str, ...] = ()
    """Replicas that have just failed this request."""

    deadline: Deadline | None = None
    """After which the answer is worthless."""

    def seconds_left(self) -> float | None:
        """Until the deadline, negative once it has passed. None without one."""
        return None if self.deadline is None else self.deadline.left_s()


@dataclass(frozen=True)
class OpenAIHead:
    """The first thing that comes back. The body's parts, text, follow: server-sent events as they are made, or one
    whole JSON document."""

    status: int
    media_type: str = "application/json"

    @property
    def is_stream(self) -> bool:
        return self.media_type == "text/event-stream"
