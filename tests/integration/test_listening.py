"""What listens where: the ends of a link, and the stores at which ranks meet, which take keys from whoever reaches
them."""

from __future__ import annotations

import multiprocessing
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch.distributed import TCPStore

from outrider.cluster.link.rendezvous import host_link, open_store

pytestmark = pytest.mark.timeout(300)


def listening() -> set[tuple[str, int]]:
    connections = psutil.Process().net_connections("tcp")
    return {tuple(each.laddr) for each in connections if each.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2"])
def test_a_link_listens_where_it_was_told_to_alone(host: str) -> None:
    before = listening()
    address, complete = host_link(host, "auto")
    ports = {int(endpoint.rpartition(":")[2]) for endpoint in address.endpoints}
    assert listening() - before == {(host, port) for port in ports}
    del complete
    assert listening() == before


def test_a_link_within_a_machine_listens_at_no_port() -> None:
    before = listening()
    listening_end = host_link(None, "auto")
    assert listening() == before
    del listening_end


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


def meet(answer: Any) -> None:
    """Runs in a process of its own: the default process group stays in the process that makes it."""
    before = listening()
    rank = SimpleNamespace(_parallel_config=SimpleNamespace(world_size=1))
    method = executor().RankProc.create_dist_init_method(rank)
    torch.distributed.init_process_group("gloo", init_method=method, world_size=1, rank=0)
    answer.put((method, listening() - before))


def executor() -> Any:
    """With vLLM: seconds, the first time in a process."""
    from outrider.actors.vllm_adapter import executor

    return executor


def test_the_process_group_of_one_rank_is_reached_from_this_machine_alone() -> None:
    executor()  # here, where other tests need vLLM too, and so in the fork
    context = multiprocessing.get_context("fork")
    answer = context.SimpleQueue()
    process = context.Process(target=meet, args=(answer,))
    process.start()
    process.join()
    assert process.exitcode == 0
    method, addresses = answer.get()
    assert method.startswith("tcp://127.0.0.1:")
    assert {host for host, _ in addresses} == {"127.0.0.1"}
