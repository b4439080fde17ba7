"""Requests that are in the middle of their answers when something happens."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.deploy.client.sync_client import OutriderClient, OutriderError
from tests.serving import HANG_GUARD_S, wait_until


@dataclass
class Stream:
    """A greedy request of so many tokens in a thread of its own, and how it went."""

    prompt: list[int]
    max_tokens: int
    request_id: str | None = None
    tokens: list[int] = field(default_factory=list)
    error: OutriderError | None = None

    def start(self, client: OutriderClient) -> None:
        self._thread = threading.Thread(target=self._run, args=(client,), daemon=True)
        self._thread.start()

    def join(self) -> None:
        self._thread.join(HANG_GUARD_S)
        assert not self._thread.is_alive(), "a request hangs"

    def _run(self, client: OutriderClient) -> None:
        try:
            with client.stream(
                self.prompt,
                temperature=0.0,
                max_tokens=self.max_tokens,
                ignore_eos=True,
                request_id=self.request_id,
            ) as messages:
                for message in messages:
                    self.tokens += message.token_ids
        except OutriderError as error:
            self.error = error


def under_way(client: OutriderClient, number: int, max_tokens: int) -> list[Stream]:
    """So many, whose prompts have nothing in common, once each has its first token."""
    streams = [Stream([(each * 11 + at * 5) % 250 for at in range(40)], max_tokens) for each in range(number)]
    for stream in streams:
        stream.start(client)
    wait_until(lambda: all(stream.tokens for stream in streams), HANG_GUARD_S, "all of them under way")
    return streams


def join(streams: Sequence[Stream]) -> list[OutriderError]:
    """What those that failed were told."""
    for stream in streams:
        stream.join()
    return [stream.error for stream in streams if stream.error is not None]
