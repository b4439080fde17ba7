"""The machine's clock jumps under load, an hour forwards and two hours back, for every process of a deployment.

tests/wall_clock.c is preloaded into them: the time of day as libc tells it, and waits until one (conditions,
semaphores, futexes), of Python as well as of the C++ of Ray and gRPC. Monotonic clocks go on. Not seen: times of files,
which are the machine's, and a jump on one machine of several; and what Ray does by the time of day itself, see
docs/failures.md. When keys and certificates expire: tests/unit/security. The tests follow each other.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass

import psutil
import pytest
from ray.cluster_utils import Cluster

from outrider.actors.serve_seam import PROXY_ENVIRONMENT
from outrider.actors.serve_seam.autoscaling import REPORT_LASTS_S
from outrider.cluster.config import parse_config
from outrider.cluster.placement import available_cores
from outrider.deploy.ports import pick_free_port
from tests.clusters import served_on
from tests.faulted import Faulted, check_all_is_well, only
from tests.pools import scraped
from tests.processes import DRAFTER, INGRESS, PROXY, processes
from tests.serving import HANG_GUARD_S, Deployment, Models, engine, wait_until
from tests.wall_clock import COMPILER, WallClock

pytestmark = [
    pytest.mark.engine,
    pytest.mark.exhaustive,
    pytest.mark.timeout(900),
    pytest.mark.skipif(COMPILER is None, reason="no C compiler, which makes the clock that jumps"),
]

HOUR_S = 3600
LOADED_WITHIN_S = 300.0
RAYS_OWN = {"gcs_server", "raylet"}


@dataclass
class Jumping:
    """An application on a cluster whose clock a test moves."""

    app: Deployment
    clock: WallClock

    def load_is_known(self) -> bool:
        """To the controller, which the target reports it to."""
        reasons = scraped(self.app).of("outrider:autoscaling_reason")
        return {labels["reason"] for labels, value in reasons if value == 1}.isdisjoint(("no_data", "loading"))

    def processes(self) -> dict[str, list[int]]:
        return {what: sorted(pids) for what, pids in processes(self.app).items()}


@pytest.fixture(scope="module")
def jumping(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jumping]:
    clock = WallClock(tmp_path_factory.mktemp("clock"))
    cores = available_cores()
    config = parse_config(
        {
            "target": engine(models.target, max_num_seqs=8, cores=[[cores[0]]]),
            "drafter": {"method": "draft_model", **engine(models.drafter, cores=[[cores[-1]]])},
            "speculation": {"num_speculative_tokens": 8, "adaptive": False},
            "serving": {
                "grpc_port": pick_free_port(),
                "http_port": pick_free_port(),
                "autoscaling": {"min": 1, "max": 2, "target_queue_s": 60, "target_round_ms": 60_000},
            },
        }
    )
    with pytest.MonkeyPatch.context() as environment:
        for name, value in {**PROXY_ENVIRONMENT, **clock.environment}.items():
            environment.setenv(name, value)
        cluster = Cluster(True, head_node_args={"num_cpus": 16, "include_dashboard": False})
        with served_on(cluster, config, models) as app:
            wait_until(app.all_replicas_are_known, LOADED_WITHIN_S, "the target", every_s=0.5)
            yield Jumping(app, clock)


def test_every_process_has_the_clock(jumping: Jumping) -> None:
    rays = [each for each in psutil.Process().children(recursive=True) if each.name() in RAYS_OWN]
    assert {each.name() for each in rays} == RAYS_OWN
    pids = [each.pid for each in rays] + [pid for pids in processes(jumping.app).values() for pid in pids]
    assert all(jumping.clock.is_of(pid) for pid in pids)
    jumping.clock.jump(HOUR_S)
    ahead_s = jumping.clock.shown() - time.time()
    jumping.clock.jump(-HOUR_S)
    assert ahead_s > HOUR_S / 2


def test_nobody_is_told_of_it_and_all_are_drafted_for(jumping: Jumping) -> None:
    app = jumping.app
    link, before = app.linked(), jumping.processes()
    wait_until(jumping.load_is_known, HANG_GUARD_S, "reports of the target's load", every_s=0.5)
    with Faulted(app) as fault:
        for jump_s in (HOUR_S, -2 * HOUR_S):
            rounds = app.status().rounds
            jumping.clock.jump(jump_s)
            jumped = time.monotonic()
            # So long that the controller would miss reports that do not come, or are taken for old ones.
            while time.monotonic() - jumped < 2 * REPORT_LASTS_S:
                fault.clients.wait_for_answers()
                assert app.linked().epoch == link.epoch
            now = app.status().rounds
            drafted = (now.drafted_rounds - rounds.drafted_rounds) / (now.rounds - rounds.rounds)
            print(f"{drafted:.0%} of the rounds after a jump by {jump_s:+d} s were drafted for")
            assert drafted > 0.5
            assert jumping.load_is_known()
        fault.whole_again()
    fault.check(cut=False)
    assert jumping.processes() == before, "nobody was given up"
    told = scraped(app)
    for name in ("step_seconds", "step_target_seconds", "proposal_wait_seconds", "drafter_step_seconds"):
        assert 0 < told.sum(f"outrider:{name}_sum") < HOUR_S / 2, name


@pytest.mark.parametrize("what", [DRAFTER, INGRESS, PROXY])
def test_what_dies_when_the_clock_has_been_put_back_is_replaced(jumping: Jumping, what: str) -> None:
    """And not an hour later, when it shows again what it showed then."""
    jumping.clock.jump(-HOUR_S)
    with Faulted(jumping.app) as fault:
        pid = only(jumping.app, what)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: pid not in processes(jumping.app).get(what, []), HANG_GUARD_S, "its end is known")
        fault.whole_again()
    fault.check(cut=what != DRAFTER, without_status=what == PROXY)
    check_all_is_well(jumping.app)
