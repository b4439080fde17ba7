"""``/metrics`` of the whole application: every replica's text and the ingress's own, in one exposition. Pure."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from actors.observability.exposition import Families, merge, render


class Scraped(NamedTuple):
    """One replica's answer. A replica that was silent has no text, and may not have said who it is."""

    replica: str | None
    text: str | None


class ApplicationMetrics:
    """Scrapes that come while one is under way share its answer.

    ask_replicas: one answer for each replica that is running; raises nothing.
    """

    def __init__(self, ask_replicas: Callable[[], Awaitable[Sequence[Scraped]]], own_text: Callable[[], str]) -> None:
        self._ask_replicas, self._own_text = ask_replicas, own_text
        self._scraping: asyncio.Task[str] | None = None
        self._known: set[str] = set()
        """Replicas that answered, or were silent, the last time."""

    async def text(self) -> str:
        if self._scraping is None or self._scraping.done():
            self._scraping = asyncio.create_task(self._scrape())
        # A client that leaves must not take the answer from the others.
        return await asyncio.shield(self._scraping)

    async def _scrape(self) -> str:
        answers = await self._ask_replicas()
        texts = {answer.replica: answer.text for answer in answers if answer.replica is not None and answer.text}
        num_silent = len(answers) - len(texts)
        # Who is silent does not always say who it is: while anyone is, those that are missed are taken for them.
        named = {answer.replica for answer in answers if answer.replica is not None}
        missing = (self._known | named if num_silent else named) - set(texts)
        self._known = set(texts) | missing
        families = Families()
        for replica in sorted(self._known):
            families.add("outrider:replica_up", float(replica in texts), replica=replica)
        families.add("outrider:replicas_silent", num_silent)
        merged = await asyncio.to_thread(merge, dict(sorted(texts.items())))
        return "".join((render(families), self._own_text(), merged))
