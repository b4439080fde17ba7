"""Sharing cores between ranks: nobody gets a core twice while there are enough, and a shortage is said."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest

from outrider.cluster.config import ConfigError, OutriderConfig, parse_config
from outrider.cluster.placement import available_cores, bind_to, plan_cores


def config(
    target_ranks: int = 1,
    drafter: str | None = "draft_model",
    drafter_ranks: int = 1,
    target_cores: list[list[int]] | None = None,
    drafter_cores: list[list[int]] | None = None,
) -> OutriderConfig:
    data: dict[str, Any] = {"target": {"model": "t", "tensor_parallel_size": target_ranks, "cores": target_cores}}
    if drafter == "draft_model":
        data["drafter"] = {"method": drafter, "model": "d", "tensor_parallel_size": drafter_ranks}
    elif drafter == "ngram":
        data["drafter"] = {"method": drafter}
    if drafter:
        data["drafter"]["cores"] = drafter_cores
    return parse_config(data)


@pytest.mark.parametrize("drafter", ["draft_model", "ngram", None])
@pytest.mark.parametrize("target_ranks", [1, 2, 3])
@pytest.mark.parametrize("number", range(4, 12))
def test_enough_cores_are_shared_out_without_overlap(number: int, target_ranks: int, drafter: str | None) -> None:
    available = [3 * core for core in range(number)]
    plan = plan_cores(config(target_ranks, drafter), available)
    used = [core for cores in (*plan.target, *plan.drafter) for core in cores]
    assert sorted(used) == available
    assert plan.warnings == ()


@pytest.mark.parametrize("drafter", ["draft_model", "ngram"])
@pytest.mark.parametrize(("target_ranks", "number"), [(1, 1), (2, 1), (2, 2), (3, 2), (4, 3)])
def test_a_shortage_is_shared_and_said(target_ranks: int, number: int, drafter: str) -> None:
    plan = plan_cores(config(target_ranks, drafter), range(number))
    assert plan.warnings, "ranks that share a core must not go unnoticed"
    assert all(plan.target)
    assert all(plan.drafter)
    assert {core for cores in plan.target for core in cores} == set(range(min(number, target_ranks)))


def test_explicit_cores_are_kept_and_the_other_side_gets_the_rest() -> None:
    plan = plan_cores(config(target_cores=[[3, 2]]), range(4))
    assert (plan.target, plan.drafter) == (((2, 3),), ((0, 1),))
    plan = plan_cores(config(target_ranks=2, drafter_cores=[[0]]), range(4))
    assert (plan.target, plan.drafter) == (((1, 2), (3,)), ((0,),))
    plan = plan_cores(config(target_cores=[[1]], drafter_cores=[[0]]), range(4))
    assert (plan.target, plan.drafter) == (((1,),), ((0,),))
    plan = plan_cores(config(target_cores=[[0, 1]]), range(2))
    assert plan.drafter == ((0, 1),)
    assert any("no core is left for the drafter" in warning for warning in plan.warnings)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"target_cores": [[0, 7]]}, r"target\.cores: core 7 not available here.*cores 0, 1"),
        ({"drafter_cores": [[9]]}, r"drafter\.cores: core 9 not available"),
        ({"target_cores": [[0, 1]], "drafter_cores": [[1]]}, r"drafter\.cores: core 1 also in target\.cores"),
    ],
)
def test_impossible_cores_are_refused(wanted: dict[str, list[list[int]]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_cores(config(**wanted), [0, 1])  # type: ignore[arg-type]


def test_binding_reaches_threads_that_run_already_and_later_ones() -> None:
    before = available_cores()
    release, masks = threading.Event(), {}

    def report(name: str) -> None:
        if name == "early":
            release.wait(10)
        masks[name] = os.sched_getaffinity(0)

    early = threading.Thread(target=report, args=("early",))
    early.start()
    try:
        bind_to(before[-1:])
        late = threading.Thread(target=report, args=("late",))
        late.start()
        release.set()
        early.join()
        late.join()
        assert masks == {"early": {before[-1]}, "late": {before[-1]}}
    finally:
        release.set()
        bind_to(before)
