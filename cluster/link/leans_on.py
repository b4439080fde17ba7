"""Every name of torch's that transport.py uses beyond its public API (see cluster/borrowed.py). Written for torch 2.13.

Looked for by tests, and by nobody at start-up: a link that needs one of them says so itself when it is made.
"""

from __future__ import annotations

from outrider.cluster.borrowed import Project, Table, rows

LEANS_ON = Table(
    Project("PyTorch", ("torch",), "2."),
    "cluster/link/transport.py",
    rows("""
torch.distributed:ProcessGroupGloo._Options [_timeout, _devices, _threads]: a group on one address, with a deadline to
    connect and one thread; init_process_group and new_group make no group beside the process's default one
torch.distributed:Backend._plugins < torch.distributed.distributed_c10d:_new_process_group_helper: groups of a
    platform's own backend
torch.distributed:Backend._BackendPlugin [creator_fn, extended_api]: what is in it
torch.distributed.distributed_c10d:_DistributedBackendOptions [store, group_rank, group_size, timeout, group_id,
    global_ranks_in_group]: what such a backend may want to be made of
"""),
)
