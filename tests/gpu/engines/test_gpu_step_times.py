"""Measures, and asserts no time: the target's step with K drafts for every request and with lengths that differ, the
CUDA graphs that it replays, and how long the target stands between two steps.

Prints a table. Tiny random weights by default; OUTRIDER_GPU_PAIRS names real ones, as for test_gpu_drafters.py:
`{"dense": ["target", "drafter"]}`.
"""

import json
import os

import pytest

pytest.importorskip("ray")
pytest.importorskip("grpc")

from tests.gpu.engines.deployments import measured_pair
from tests.support.load.step_times import HEADER, K, count_graphs, in_replica, line, measured

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800), pytest.mark.gpus(2)]

BATCHES = (1, 8, 32)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.gpus(3))])
def test_step_times_and_graphs_of_even_and_of_mixed_lengths(added, models, capsys, ranks):
    named = json.loads(os.environ.get("OUTRIDER_GPU_PAIRS", "{}"))
    target, drafter = named.get("dense", (models.target, models.drafter))
    pair = added(f"measured, {ranks} ranks", **measured_pair(target, drafter, K, ranks))
    in_replica(pair, count_graphs)
    rows = [measured(pair, batch, mixed) for mixed in (False, True) for batch in BATCHES]
    with capsys.disabled():
        print(f"\n{target}, target ranks {ranks}\n{HEADER}")
        print("\n".join(map(line, rows)))
    assert all(row["drafts_a_round"] > 0 for row in rows), "nothing was drafted"
