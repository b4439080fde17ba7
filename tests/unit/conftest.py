"""For all unit tests."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def nobody_goes_through_the_heap() -> Iterator[None]:
    """A front's process has a thread for that. Here it would go through all that the tests of a process have loaded, a
    gigabyte, every few seconds; tests of its own have processes of their own."""
    from outrider.actors.serving import heap

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heap, "_trim", lambda library, every_s, least: None)
        yield
