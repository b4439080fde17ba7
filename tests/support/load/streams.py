"""Streams one request in a thread, or several, and keeps how it went."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.deploy.client.sync_client import OutriderClient, OutriderError
from tests.support.cluster.serving import HANG_GUARD_S, wait_until


@dataclass
class Stream:
    """Streams one answer, greedy unless options say otherwise, and keeps what came and when."""

    prompt: list[int]
    max_tokens: int
    request_id: str | None = None
    options: dict[str, Any] = field(default_factory=lambda: {"temperature": 0.0})
    tokens: list[int] = field(default_factory=list)
    began_s: float = 0.0
    came_s: list[float] = field(default_factory=list)
    """When each message came, by the monotonic clock."""

    finish_reason: int = 0
    error: OutriderError | None = None

    def start(self, client: OutriderClient) -> None:
        self._thread = threading.Thread(target=self.read, args=(client,), daemon=True)
        self._thread.start()

    def join(self) -> None:
        self._thread.join(HANG_GUARD_S)
        assert not self._thread.is_alive(), "a request hangs"

    def read(self, client: OutriderClient) -> None:
        """Read the answer to its end in the calling thread."""
        self.began_s = time.monotonic()
        asked = {"max_tokens": self.max_tokens, "ignore_eos": True, "request_id": self.request_id, **self.options}
        try:
            with client.stream(self.prompt, **asked) as messages:
                for message in messages:
                    self.tokens += message.token_ids
                    self.came_s.append(time.monotonic())
                    self.finish_reason = message.finish_reason
        except OutriderError as error:
            self.error = error


def prompt_of(number: int) -> list[int]:
    """Return one of some prompts that have nothing in common."""
    return [(number * 11 + position * 5) % 250 for position in range(40)]


def started(client: OutriderClient, number: int, max_tokens: int, **options: Any) -> list[Stream]:
    """Start so many streams."""
    more = {"options": options} if options else {}
    streams = [Stream(prompt_of(each), max_tokens, **more) for each in range(number)]
    for stream in streams:
        stream.start(client)
    return streams


def under_way(client: OutriderClient, number: int, max_tokens: int, **options: Any) -> list[Stream]:
    """Start so many streams, and wait until each has its first token."""
    streams = started(client, number, max_tokens, **options)
    wait_until(lambda: all(stream.tokens for stream in streams), HANG_GUARD_S, "all of them under way")
    return streams


def join(streams: Sequence[Stream]) -> list[OutriderError]:
    """Wait until all have ended. Return the errors of those that failed."""
    for stream in streams:
        stream.join()
    return [stream.error for stream in streams if stream.error is not None]
