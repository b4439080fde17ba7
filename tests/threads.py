"""A fixture for every suite. `tests.gpu` loads it by name: it reads no conftest above its folder."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Tiny models are slower on several of torch's."""
    import torch  # not before OMP_NUM_THREADS is set

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
