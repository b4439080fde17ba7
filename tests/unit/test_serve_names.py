"""The installed Ray Serve has every private or alpha name that actors/serve_adapter calls or overrides."""

from __future__ import annotations

import inspect

import pytest
from ray.serve.request_router import RequestRouter

from outrider.actors.serve_adapter.request_router import TargetRouter

OVERRIDDEN = [
    name for name in vars(TargetRouter) if hasattr(RequestRouter, name) and not name.startswith(("__", "_abc"))
]


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_the_router_overrides_public_hooks_as_they_are(name: str) -> None:
    assert not name.startswith("_")
    ours, theirs = vars(TargetRouter)[name], inspect.getattr_static(RequestRouter, name)
    if isinstance(theirs, property):
        assert isinstance(ours, property)
    elif name != "initialize_state":  # takes whatever request_router_kwargs says
        assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters)
