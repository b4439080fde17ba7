import pytest


@pytest.fixture(autouse=True)
def models_are_tiny(one_thread):
    """All of them."""
