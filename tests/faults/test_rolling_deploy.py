"""Another configuration is deployed under load: a new replica takes over from the only old one, and nobody is told."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from ray import serve

from outrider.cluster.config import parse_config
from outrider.deploy.app import build_app, plan_replica
from outrider.deploy.client.sync_client import OutriderError
from tests.serving import HANG_GUARD_S, Deployment, Deployments, Models, engine, wait_until
from tests.stalls import Stalls
from tests.traffic import longest_gap_s, running

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(900)]

CALLERS, ANSWER_TOKENS = 4, 120
ENDED_BEFORE_AND_AFTER = 2 * CALLERS


@dataclass
class Answer:
    prompt: list[int]
    began_s: float
    tokens: list[int] = field(default_factory=list)
    came_s: list[float] = field(default_factory=list)


class Load:
    """Callers with one stream after the other."""

    def __init__(self, deployment: Deployment) -> None:
        self._client = deployment.client
        self._over = threading.Event()
        self.answers: list[Answer] = []
        """That have ended."""

        self.errors: list[str] = []
        self.stalls = Stalls()

    def longest_gap_s(self) -> float:
        """Of a stream: see traffic.longest_gap_s."""
        return max(longest_gap_s(answer.came_s, self.stalls) for answer in self.answers)

    def _call(self, caller: int) -> None:
        for number in itertools.count():
            if self._over.is_set():
                return
            prompt = [(caller * 11 + number * 3 + position * 5) % 250 for position in range(20)]
            answer = Answer(prompt, time.monotonic())
            try:
                with self._client.stream(prompt, temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True) as stream:
                    for message in stream:
                        answer.tokens += message.token_ids
                        answer.came_s.append(time.monotonic())
            except OutriderError as error:
                self.errors.append(repr(error))
                return
            self.answers.append(answer)

    @contextmanager
    def calling(self) -> Iterator[None]:
        threads = [threading.Thread(target=self._call, args=(number,), daemon=True) for number in range(CALLERS)]
        with self.stalls, running(threads, self._over):
            yield

    def wait_for(self, more: int) -> None:
        enough = len(self.answers) + more
        wait_until(lambda: self.errors or len(self.answers) >= enough, HANG_GUARD_S, f"{more} more answers")


@pytest.fixture
def rolling(deployments: Deployments, models: Models) -> Deployment:
    drafter = {"method": "draft_model", **engine(models.drafter)}
    deployments.add("rolling", {"target": engine(models.target), "drafter": drafter})
    return deployments.use("rolling")


def test_the_only_replica_is_replaced_and_nobody_hears_of_it(rolling: Deployment) -> None:
    [old] = rolling.replicas()
    changed = parse_config({**rolling.config.model_dump(exclude_unset=True), "speculation": {"adaptive": False}})
    load = Load(rolling)
    with load.calling():
        load.wait_for(ENDED_BEFORE_AND_AFTER)
        deployed_s = time.monotonic()
        serve.run(build_app(changed, plan_replica(changed)), name=changed.serving.app_name, route_prefix="/")
        taken_over_s = time.monotonic()
        wait_until(lambda: old not in rolling.replicas(), HANG_GUARD_S, "the old replica's end")
        load.wait_for(ENDED_BEFORE_AND_AFTER)
    assert load.errors == []
    for number, answer in enumerate(load.answers):
        assert len(answer.tokens) == ANSWER_TOKENS
        rolling.reference.check(answer.prompt, answer.tokens, label=f"answer {number}")
    meanwhile = [a for a in load.answers if a.began_s > deployed_s and a.came_s[-1] < taken_over_s]
    assert len(meanwhile) >= CALLERS
    assert len(rolling.replicas()) == 1
    gap, first = load.longest_gap_s(), max(a.came_s[0] - a.began_s for a in load.answers)
    assert first < (taken_over_s - deployed_s) / 2, "the old replica serves until the new one can"
    print(
        f"\nrolled over in {taken_over_s - deployed_s:.1f} s: {len(load.answers)} answers, {len(meanwhile)} meanwhile; "
        f"longest gap of a stream {gap:.2f} s, longest wait for a first token {first:.2f} s"
    )
