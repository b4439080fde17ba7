"""Another configuration is deployed under load: a new replica takes over from the only old one, and nobody is told. One
that dies while the old one drains is started again. A pool has as many drafters as ever meanwhile."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress

import grpc
import pytest
import ray
from ray import serve
from ray.serve.schema import ApplicationStatus

from outrider.cluster.config import OutriderConfig, parse_config
from outrider.deploy.app import build_app, plan_replica
from outrider.deploy.client.sync_client import OutriderError
from tests.support.cluster.pools import all_draft, ask_registry, is_even
from tests.support.cluster.processes import INGRESS, TARGET
from tests.support.cluster.serving import HANG_GUARD_S, Deployment, Deployments, Models, engine, wait_until
from tests.support.load.traffic import Traffic, running
from tests.support.models.reference import GREEDY

pytestmark = [pytest.mark.engine, pytest.mark.exhaustive, pytest.mark.timeout(900)]

CALLERS, ANSWER_TOKENS = 4, 120
LONG_ANSWER_TOKENS = 900
"""So that an old replica has something to end for a while."""

BACK_WITHIN_S = 300.0
"""A replica that loads its models anew, while requests run on few cores."""

ENDED_BEFORE_AND_AFTER = 2 * CALLERS


def prompt_of(caller: int, number: int) -> list[int]:
    return [(caller * 11 + number * 3 + position * 5) % 250 for position in range(20)]


def load(deployment: Deployment, tokens: int = ANSWER_TOKENS, goes_on: bool = False) -> Traffic:
    """Return callers with one greedy stream after the other, whose answers are checked when they stop."""
    return Traffic(deployment, prompt_of, tokens, [GREEDY], callers=CALLERS, goes_on=goes_on)


@pytest.fixture
def rolling(deployments: Deployments, models: Models) -> Deployment:
    drafter = {"method": "draft_model", **engine(models.drafter)}
    deployments.add("rolling", {"target": engine(models.target), "drafter": drafter, "serving": {"surge": True}})
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
    with load(rolling, LONG_ANSWER_TOKENS, goes_on=True) as calls:
        calls.wait_for_answers(CALLERS)
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
        calls.wait_for_answers(ENDED_BEFORE_AND_AFTER)
    assert all(isinstance(error, OutriderError) for error in calls.errors)
    assert {error.code for error in calls.errors} <= {grpc.StatusCode.UNAVAILABLE}


def test_the_only_replica_is_replaced_and_nobody_hears_of_it(rolling: Deployment) -> None:
    [old] = rolling.replicas()
    config = changed(rolling)
    with load(rolling) as calls:
        calls.wait_for_answers(ENDED_BEFORE_AND_AFTER)
        deployed_s = time.monotonic()
        serve.run(build_app(config, plan_replica(config)), name=config.serving.app_name, route_prefix="/")
        taken_over_s = time.monotonic()
        wait_until(lambda: old not in rolling.replicas(), HANG_GUARD_S, "the old replica's end")
        calls.wait_for_answers(ENDED_BEFORE_AND_AFTER)
    meanwhile = [a for a in calls.answers if a.began_s > deployed_s and a.came_s[-1] < taken_over_s]
    assert len(meanwhile) >= CALLERS
    assert len(rolling.replicas()) == 1
    gap, first = calls.longest_gap(), max(a.came_s[0] - a.began_s for a in calls.answers)
    print(
        f"\nrolled over in {taken_over_s - deployed_s:.1f} s: {len(calls.answers)} answers, {len(meanwhile)} then; "
        f"longest gap of a stream {gap:.2f} s, longest wait for a first token {first:.2f} s"
    )
    assert first < (taken_over_s - deployed_s) / 2, "the old replica serves until the new one can"
    assert gap < (taken_over_s - deployed_s) / 2, "no stream stands still while one replica takes over from another"


@pytest.fixture
def rolling_pool(deployments: Deployments, models: Models) -> Deployment:
    drafter = {"method": "draft_model", **engine(models.drafter), "placement": "pool", "num_drafters": 2}
    target = engine(models.target, max_num_seqs=4)
    speculation = {"num_speculative_tokens": 8, "adaptive": False}
    sections = {
        "target": target,
        "drafter": drafter,
        "speculation": speculation,
        "serving": {"num_replicas": 2, "surge": True},
    }
    deployments.add("rolling_pool", sections)
    return deployments.use("rolling_pool")


def test_a_pool_and_its_targets_are_replaced_and_nobody_hears_of_it(rolling_pool: Deployment) -> None:
    """Each new drafter has loaded before an old one ends."""
    wait_until(lambda: is_even(rolling_pool), HANG_GUARD_S, "a drafter each")
    targets, drafters = set(rolling_pool.replicas()), set(ask_registry(rolling_pool, "drafters"))
    config = parse_config(
        {**rolling_pool.config.model_dump(exclude_unset=True), "speculation": {"num_speculative_tokens": 4}}
    )
    calls, over = load(rolling_pool), threading.Event()
    counts: list[int] = []

    def count() -> None:
        while not over.wait(0.1):
            with suppress(ValueError, ray.exceptions.RayError):
                counts.append(len(ask_registry(rolling_pool, "drafters")))

    def replaced() -> bool:
        left = targets & set(rolling_pool.replicas()) or drafters & set(ask_registry(rolling_pool, "drafters"))
        return not left and is_even(rolling_pool)

    with calls, running([threading.Thread(target=count, daemon=True)], over):
        calls.wait_for_answers(ENDED_BEFORE_AND_AFTER)
        deployed_s = time.monotonic()
        serve.run(build_app(config, plan_replica(config)), name=config.serving.app_name, route_prefix="/")
        wait_until(replaced, BACK_WITHIN_S, "other targets, and other drafters, one each", every_s=0.5)
        replaced_s = time.monotonic()
        calls.wait_for_answers(ENDED_BEFORE_AND_AFTER)
    gap, seconds = calls.longest_gap(), replaced_s - deployed_s
    print(
        f"\nrolled over in {seconds:.1f} s: {len(calls.answers)} answers, {min(counts)} to {max(counts)} drafters; "
        f"longest gap of a stream {gap:.2f} s"
    )
    assert min(counts) == 2, "never fewer than there are to be"
    assert gap < seconds / 2
    all_draft(rolling_pool)
