"""Queries of a deployment whose targets share a pool of drafters."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import ray

from outrider.cluster.placement import NAMESPACE
from outrider.cluster.registry import registry_name
from tests.support.cluster.scrape import Scrape, parse
from tests.support.cluster.serving import HANG_GUARD_S, Deployment, wait_until
from tests.support.load.traffic import EVERY_WAY, Traffic

FRESH_S = 5.0
"""Seconds. Older numbers were counted before."""

ANSWER_WITHIN_S = 10.0
MAX_TOKENS = 300
PROMPT = list(b"Whoever drafts, the words are the same. ")


def ask_registry(pool: Deployment, method: str, *args: Any) -> Any:
    """Raises ValueError or RayError while there is none."""
    registry = ray.get_actor(registry_name(pool.config.serving.app_name), namespace=NAMESPACE)
    return ray.get(getattr(registry, method).remote(*args), timeout=HANG_GUARD_S)


def shares(pool: Deployment) -> list[int]:
    """Return how many links of each drafter are up. Nothing while there is no registry."""
    with suppress(ValueError, ray.exceptions.RayError):
        return sorted(len(users) for users in ask_registry(pool, "drafters").values())
    return []


def is_even(pool: Deployment) -> bool:
    return shares(pool) == [1, 1]


def scrape(pool: Deployment) -> str:
    with urllib.request.urlopen(f"{pool.http_url}/metrics", timeout=HANG_GUARD_S) as response:
        return str(response.read().decode())


def scraped(pool: Deployment) -> Scrape:
    return parse(scrape(pool), time.monotonic())


@contextmanager
def load(pool: Deployment) -> Iterator[None]:
    """Streams to both targets, each way of choosing tokens at any time, each answer checked. None of them has left
    anything at a drafter afterwards."""
    with ExitStack() as streams:
        for first in range(len(EVERY_WAY)):
            choices = [*EVERY_WAY[first:], *EVERY_WAY[:first]]
            streams.enter_context(Traffic(pool, PROMPT, MAX_TOKENS, choices))
        yield
    wait_until(lambda: not any(map(holds, pool.drafters())), HANG_GUARD_S, "all drafters hold nothing")


def holds(drafter: str) -> dict[str, float]:
    """Return what requests occupy at a drafter, by name: values that are not 0, or not known."""
    try:
        status = ray.get(ray.get_actor(drafter, namespace=NAMESPACE).status.remote(), timeout=ANSWER_WITHIN_S)
    except (ValueError, ray.exceptions.RayError):
        return {"no answer": 1.0}
    taken = "num_sequences", "num_prefilling", "num_side_branches", "branch_blocks", "kv_cache_usage"
    return {name: status[name] for name in taken if status.get(name)}


def by_target(pool: Deployment, name: str, **labels: str) -> dict[str, float]:
    """Return a metric of each target replica, once all of them have told it, as it is now."""

    def all_told() -> dict[str, float] | None:
        now, replicas = scraped(pool), list(pool.replicas())
        ages = [now.value("outrider:snapshot_age_seconds", replica=replica) for replica in replicas]
        if not replicas or any(age is None or age > FRESH_S for age in ages):
            return None
        return {replica: now.sum(name, replica=replica, **labels) for replica in replicas}

    told: dict[str, float] = wait_until(all_told, HANG_GUARD_S, f"{name} of every target", every_s=0.5)
    return told


def all_draft(pool: Deployment) -> None:
    """Wait until every target has been drafted for since now."""
    before = by_target(pool, "outrider:drafted_rounds_total")

    def once() -> bool:
        with ThreadPoolExecutor(4) as clients:
            asked = [
                clients.submit(pool.client.generate, PROMPT, temperature=0.0, max_tokens=64, ignore_eos=True)
                for _ in range(8)
            ]
            for answer in asked:
                pool.reference.check(PROMPT, answer.result().token_ids, label="any of both")
        after = by_target(pool, "outrider:drafted_rounds_total")
        return before.keys() == after.keys() and all(after[replica] > count for replica, count in before.items())

    wait_until(once, HANG_GUARD_S, "both targets are drafted for")
