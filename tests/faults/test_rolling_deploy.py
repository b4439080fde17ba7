"""Another configuration is deployed under load: a new replica takes over from the only old one, and nobody is told. One
that dies while the old one drains is started again. A pool has as many drafters as ever meanwhile."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import grpc
import pytest
import ray
from ray import serve
from ray.serve.schema import ApplicationStatus

from outrider.cluster.config import OutriderConfig, parse_config
from outrider.deploy.app import build_app, plan_replica
from outrider.deploy.client.sync_client import OutriderError
from tests.pools import all_draft, ask_registry, is_even
from tests.processes import INGRESS, TARGET
from tests.serving import HANG_GUARD_S, Deployment, Deployments, Models, engine, wait_until
from tests.stalls import Stalls
from tests.traffic import longest_gap_s, running

pytestmark = [pytest.mark.engine, pytest.mark.exhaustive, pytest.mark.timeout(900)]

CALLERS, ANSWER_TOKENS = 4, 120
LONG_ANSWER_TOKENS = 900
"""So that an old replica has something to end for a while."""

BACK_WITHIN_S = 300.0
"""A replica that loads its models anew, while requests run on few cores."""

LONGEST_GAP_S = 2.0
"""Of a stream, whatever happens to drafters and other replicas."""

PAUSE_S = 0.1
"""Of a caller that was told of an error."""

ENDED_BEFORE_AND_AFTER = 2 * CALLERS


@dataclass
class Answer:
    prompt: list[int]
    began_s: float
    tokens: list[int] = field(default_factory=list)
    came_s: list[float] = field(default_factory=list)


class Load:
    """Callers with one stream after the other, until one is told of an error, or whatever they are told."""

    def __init__(self, deployment: Deployment, tokens: int = ANSWER_TOKENS, goes_on: bool = False) -> None:
        self._client = deployment.client
        self._tokens, self._goes_on = tokens, goes_on
        self._over = threading.Event()
        self.answers: list[Answer] = []
        """That have ended."""

        self.errors: list[OutriderError] = []
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
                with self._client.stream(prompt, temperature=0.0, max_tokens=self._tokens, ignore_eos=True) as stream:
                    for message in stream:
                        answer.tokens += message.token_ids
                        answer.came_s.append(time.monotonic())
            except OutriderError as error:
                self.errors.append(error)
                if not self._goes_on:
                    return
                self._over.wait(PAUSE_S)
            else:
                self.answers.append(answer)

    @contextmanager
    def calling(self) -> Iterator[None]:
        threads = [threading.Thread(target=self._call, args=(number,), daemon=True) for number in range(CALLERS)]
        with self.stalls, running(threads, self._over):
            yield

    def wait_for(self, more: int) -> None:
        enough = len(self.answers) + more

        def over() -> bool:
            return len(self.answers) >= enough or (bool(self.errors) and not self._goes_on)

        wait_until(over, HANG_GUARD_S, f"{more} more answers")


@pytest.fixture
def rolling(deployments: Deployments, models: Models) -> Deployment:
    drafter = {"method": "draft_model", **engine(models.drafter)}
    deployments.add("rolling", {"target": engine(models.target), "drafter": drafter})
    return deployments.use("rolling")


def changed(deployment: Deployment) -> OutriderConfig:
    return parse_config({**deployment.config.model_dump(exclude_unset=True), "speculation": {"adaptive": False}})


def states(deployment: Deployment, of: str) -> set[str]:
    """Serve's words for those that a deployment's replicas are in."""
    found = serve.status().applications[deployment.config.serving.app_name].deployments[of].replica_states
    return {getattr(state, "value", state) for state, count in found.items() if count}


@pytest.mark.parametrize("of", [INGRESS, TARGET])
def test_a_new_replica_dies_while_the_old_one_drains_and_the_deploy_is_completed(rolling: Deployment, of: str) -> None:
    [old] = rolling.replicas(of)
    load = Load(rolling, LONG_ANSWER_TOKENS, goes_on=True)
    with load.calling():
        load.wait_for(CALLERS)
        config = changed(rolling)
        application = serve.RunTarget(
            build_app(config, plan_replica(config)), name=config.serving.app_name, route_prefix="/"
        )
        serve.run_many([application], wait_for_applications_running=False)

        both = {"RUNNING", "STOPPING"}
        wait_until(lambda: both <= states(rolling, of), BACK_WITHIN_S, "the old one drains, the new one runs")
        [(new, pid)] = [(name, pid) for name, pid in rolling.replicas(of).items() if name != old]
        os.kill(pid, signal.SIGKILL)
        assert old in rolling.replicas(of), "it still drains, or this shows nothing"

        def completed() -> bool:
            found = rolling.replicas(of)
            app = serve.status().applications[config.serving.app_name]
            return len(found) == 1 and not {old, new} & found.keys() and app.status is ApplicationStatus.RUNNING

        wait_until(completed, BACK_WITHIN_S, "another new one in its place, and the deploy at its end", every_s=0.5)
        load.wait_for(ENDED_BEFORE_AND_AFTER)
    assert {error.code for error in load.errors} <= {grpc.StatusCode.UNAVAILABLE}
    for number, answer in enumerate(load.answers):
        assert len(answer.tokens) == LONG_ANSWER_TOKENS
        rolling.reference.check(answer.prompt, answer.tokens, label=f"answer {number}")


def test_the_only_replica_is_replaced_and_nobody_hears_of_it(rolling: Deployment) -> None:
    [old] = rolling.replicas()
    config = changed(rolling)
    load = Load(rolling)
    with load.calling():
        load.wait_for(ENDED_BEFORE_AND_AFTER)
        deployed_s = time.monotonic()
        serve.run(build_app(config, plan_replica(config)), name=config.serving.app_name, route_prefix="/")
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
    print(
        f"\nrolled over in {taken_over_s - deployed_s:.1f} s: {len(load.answers)} answers, {len(meanwhile)} meanwhile; "
        f"longest gap of a stream {gap:.2f} s, longest wait for a first token {first:.2f} s"
    )
    assert first < (taken_over_s - deployed_s) / 2, "the old replica serves until the new one can"
    assert gap <= LONGEST_GAP_S, "no stream stands still while one replica takes over from another"


@pytest.fixture
def rolling_pool(deployments: Deployments, models: Models) -> Deployment:
    drafter = {"method": "draft_model", **engine(models.drafter), "placement": "pool", "num_drafters": 2}
    target = engine(models.target, max_num_seqs=4)
    speculation = {"num_speculative_tokens": 8, "adaptive": False}
    sections = {"target": target, "drafter": drafter, "speculation": speculation, "serving": {"num_replicas": 2}}
    deployments.add("rolling_pool", sections)
    return deployments.use("rolling_pool")


def test_a_pool_and_its_targets_are_replaced_and_nobody_hears_of_it(rolling_pool: Deployment) -> None:
    """Each new drafter has loaded before an old one ends."""
    wait_until(lambda: is_even(rolling_pool), HANG_GUARD_S, "a drafter each")
    targets, drafters = set(rolling_pool.replicas()), set(ask_registry(rolling_pool, "drafters"))
    config = parse_config(
        {**rolling_pool.config.model_dump(exclude_unset=True), "speculation": {"num_speculative_tokens": 4}}
    )
    load, over = Load(rolling_pool), threading.Event()
    counts: list[int] = []

    def count() -> None:
        while not over.wait(0.1):
            with suppress(ValueError, ray.exceptions.RayError):
                counts.append(len(ask_registry(rolling_pool, "drafters")))

    def replaced() -> bool:
        left = targets & set(rolling_pool.replicas()) or drafters & set(ask_registry(rolling_pool, "drafters"))
        return not left and is_even(rolling_pool)

    with load.calling(), running([threading.Thread(target=count, daemon=True)], over):
        load.wait_for(ENDED_BEFORE_AND_AFTER)
        deployed_s = time.monotonic()
        serve.run(build_app(config, plan_replica(config)), name=config.serving.app_name, route_prefix="/")
        wait_until(replaced, BACK_WITHIN_S, "other targets, and other drafters, one each", every_s=0.5)
        replaced_s = time.monotonic()
        load.wait_for(ENDED_BEFORE_AND_AFTER)
    assert load.errors == []
    for number, answer in enumerate(load.answers):
        assert len(answer.tokens) == ANSWER_TOKENS
        rolling_pool.reference.check(answer.prompt, answer.tokens, label=f"answer {number}")
    gap, seconds = load.longest_gap_s(), replaced_s - deployed_s
    print(
        f"\nrolled over in {seconds:.1f} s: {len(load.answers)} answers, {min(counts)} to {max(counts)} drafters; "
        f"longest gap of a stream {gap:.2f} s"
    )
    assert min(counts) == 2, "never fewer than there are to be"
    assert gap <= LONGEST_GAP_S
    all_draft(rolling_pool)
