"""NCCL as far as one GPU goes: it starts, sends to itself, and is aborted without waiting for anybody."""

import subprocess
import sys

import pytest

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
