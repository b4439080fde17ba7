"""Limits torch's threads, and checks that threads end.

`tests.gpu` loads it by name: it reads no conftest above its folder.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Tiny models are slower on several of torch's."""
    import torch  # not before OMP_NUM_THREADS is set

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@contextmanager
def threads_end(within_s: float) -> Iterator[None]:
    """Fail unless every Python thread that began inside has ended `within_s` seconds after it."""
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + within_s
    while left := [thread.name for thread in threading.enumerate() if thread not in before]:
        assert time.monotonic() < deadline, f"threads are left: {left}"
        time.sleep(0.01)
