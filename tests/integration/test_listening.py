"""What listens where: the stores at which ranks, and the ends of a link, meet take keys from whoever reaches them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from torch.distributed import TCPStore

from outrider.cluster.link.rendezvous import open_store
from tests.integration.echo_peer import invite

pytestmark = pytest.mark.timeout(300)

RANKS_MEET = """
import json, psutil, sys, torch
from types import SimpleNamespace
from outrider.actors.vllm_seam.executor import RankProc

rank = SimpleNamespace(_parallel_config=SimpleNamespace(world_size=1))
method = RankProc.create_dist_init_method(rank)
torch.distributed.init_process_group("gloo", init_method=method, world_size=1, rank=0)
print(json.dumps([method, [c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.status == "LISTEN"]]))
"""


def listening() -> set[tuple[str, int]]:
    connections = psutil.Process().net_connections("tcp")
    return {tuple(each.laddr) for each in connections if each.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2"])
def test_a_link_s_store_listens_where_it_was_told_to_alone(host: str) -> None:
    before = listening()
    invitation, complete = invite(1, "v", host=host)
    assert listening() - before == {(host, invitation.store_port)}
    del complete


@pytest.mark.parametrize("shared", [False, True])
def test_a_store_listens_on_one_address(shared: bool) -> None:
    before = listening()
    store = open_store("127.0.0.1", 1, shared=shared)
    assert listening() - before == {("127.0.0.1", store.port)}
    if shared:
        again = TCPStore("127.0.0.1", store.port, 1, True, wait_for_workers=False, multi_tenant=True)
        again.set("key", "value")
        assert store.get("key") == b"value"
        assert listening() - before == {("127.0.0.1", store.port)}


def test_the_process_group_of_one_rank_is_reached_from_this_machine_alone() -> None:
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", RANKS_MEET], cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    method, addresses = json.loads(done.stdout.splitlines()[-1])
    assert method.startswith("tcp://127.0.0.1:")
    assert set(addresses) == {"127.0.0.1"}
