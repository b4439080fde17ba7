"""NCCL: with one GPU it starts, sends to itself, and is aborted without waiting for anybody; with two there are links
over it, a peer that is killed, and an end that nobody waits for."""

import os
import subprocess
import sys
from contextlib import ExitStack

import pytest
import torch

from tests.integration.echo_peer import Peer
from tests.integration.test_link_processes import ROUND, abort_a_link, echo, kill_the_peer_of_a_link

LIMIT_S = 120
ONE_RANK = """
import datetime, torch, torch.distributed as dist
store = dist.HashStore()
options = dist.ProcessGroupNCCL.Options()
dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0),
                        timeout=datetime.timedelta(seconds=30), pg_options=options)
sent = torch.arange(1 << 16, device="cuda", dtype=torch.int32)
dist.broadcast(sent, 0)
dist.all_reduce(sent)
received = torch.empty_like(sent)
for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, 0), dist.P2POp(dist.irecv, received, 0)]):
    work.wait()
torch.cuda.synchronize()
assert torch.equal(sent, received)
print("sent", flush=True)
dist.distributed_c10d._get_default_group()._get_backend(torch.device("cuda")).abort()
print("aborted", flush=True)
import os; os._exit(0)
"""


@pytest.mark.usefixtures("gpu")
def test_one_rank_starts_sends_to_itself_and_is_aborted():
    done = subprocess.run(
        [sys.executable, "-c", ONE_RANK], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.stdout.split() == ["sent", "aborted"], done.stderr[-3000:]


@pytest.fixture
def new_peer(gpu):
    """Makes processes on another GPU."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    with ExitStack() as ends:

        def make():
            with pytest.MonkeyPatch.context() as environment:
                environment.setenv("CUDA_VISIBLE_DEVICES", visible[1])
                peer = Peer("nccl")
            ends.callback(peer.end)
            return peer

        yield make


def test_a_link_between_two_gpus_echoes_and_is_pinged(new_peer):
    peer = new_peer()
    link = peer.link()
    for _ in range(50):
        echo(link, ROUND)
    print(link.ping(count=64))
    link.close("verifier leaves")
    assert peer.report() == {"broken": "closed by peer: verifier leaves", "echoed": 50}


@pytest.mark.parametrize("ending", [kill_the_peer_of_a_link, abort_a_link])
def test_an_end_breaks_the_link_and_another_one_works(ending, new_peer):
    """It breaks by the deadline at the latest, which is all that NCCL within a machine has."""
    assert ending(new_peer)
