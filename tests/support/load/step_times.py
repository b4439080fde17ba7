"""Measures a served target's steps: their parts, and the CUDA graphs that they replay, by requests and drafts."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import ray
from ray import serve

from tests.support.cluster.serving import HANG_GUARD_S, MAX_MODEL_LEN, Deployment, wait_until
from tests.support.load.traffic import running

K = 4
STEPS = 600
"""Steps of a row. A server's medians are over its last 512."""

PROMPT = b"How long does a step take? "
HEADER = "drafts | batch | drafts a round | period ms | target ms | wait ms | between steps ms | graphs of the steps"


def num_drafts(index: int, mixed: bool) -> int:
    """Returns the drafts of a request. Where lengths are mixed, every second request, the first among them, has one
    fewer than the target's FULL graphs are captured for."""
    return K - 1 if mixed and index % 2 == 0 else K


def count_graphs(replica: Any) -> None:
    """Counts the CUDA graph mode of each step from now on. Runs in the target replica's process; needs the target's
    engine argument `cudagraph_metrics`, else nothing is counted."""
    manager, modes = serve.get_replica_context().servable_object._engine.llm.logger_manager, Counter()
    record = manager.record

    def recorded(**stats: Any) -> None:
        scheduled = stats["scheduler_stats"]
        if scheduled is not None and scheduled.cudagraph_stats is not None:
            modes[scheduled.cudagraph_stats.runtime_mode] += 1
        record(**stats)

    manager.record, replica.graph_modes = recorded, modes


def take_graphs(replica: Any) -> dict[str, int]:
    """Returns the steps by mode since the last call. Runs in the target replica's process."""
    taken = dict(replica.graph_modes)
    replica.graph_modes.clear()
    return taken


def in_replica(pair: Deployment, run: Callable[[Any], Any]) -> Any:
    """Calls run with the target's replica, in its process."""
    replica = ray.get_actor(pair.actors()["Target"].name, namespace="serve")
    return ray.get(replica.__ray_call__.remote(run), timeout=HANG_GUARD_S)


def measured(pair: Deployment, batch: int, mixed: bool, steps: int = STEPS) -> dict[str, Any]:
    """Returns a row of the table, measured while batch requests run for so many steps. `count_graphs` has run.

    ``between_ms`` is what of a period is neither the target's step nor a wait for drafts: the commit, the correction of
    the next step and its broadcast to the other ranks. The next step's input preparation counts as the target's.
    """
    over = threading.Event()
    errors: list[Exception] = []

    def ask(index: int) -> None:
        try:
            while not over.is_set():
                with pair.client.stream(
                    [*PROMPT, *b"%d" % index],
                    temperature=0.0,
                    max_tokens=MAX_MODEL_LEN - 64,
                    ignore_eos=True,
                    num_speculative_tokens=num_drafts(index, mixed),
                ) as stream:
                    for _ in stream:
                        if over.is_set():
                            break
        except Exception as error:  # noqa: BLE001 - shown below
            errors.append(error)

    def enough() -> bool:
        assert not errors, f"a request failed: {errors[0]!r}"
        return bool(pair.status().rounds.rounds - before.rounds >= steps * batch)

    before = pair.status().rounds
    in_replica(pair, take_graphs)
    with running([threading.Thread(target=ask, args=(index,)) for index in range(batch)], over):
        wait_until(enough, HANG_GUARD_S, f"{steps} steps of {batch}", every_s=0.5)
        graphs, after = in_replica(pair, take_graphs), pair.status().rounds
    times = after.median
    return {
        "drafts": f"{K - 1} and {K}" if mixed and batch > 1 else f"{num_drafts(0, mixed)}",
        "batch": batch,
        "drafts_a_round": (after.drafted - before.drafted) / (after.rounds - before.rounds),
        "period_ms": times.period_ms,
        "target_ms": times.target_ms,
        "wait_ms": times.wait_ms,
        "between_ms": times.period_ms - times.target_ms - times.wait_ms,
        "graphs": ", ".join(f"{mode} {count}" for mode, count in sorted(graphs.items())) or "not counted",
    }


def line(row: dict[str, Any]) -> str:
    """Returns a row as a line of the table under HEADER."""
    cells = (f"{value:.3f}" if isinstance(value, float) else str(value) for value in row.values())
    return " | ".join(cells)
