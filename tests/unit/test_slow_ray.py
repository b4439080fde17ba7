"""A Ray whose node takes longer to come up than Ray waits for."""

from __future__ import annotations

import pytest
from ray._private import services

from outrider.actors.serve_adapter import ray_processes
from outrider.actors.serve_adapter.ray_processes import wait_longer_for_node


def test_a_node_that_is_slow_is_waited_for_and_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, said = [], []

    def get_node(address: str) -> dict[str, str]:
        asked.append(address)
        if len(asked) < 4:
            raise RuntimeError("No such node")
        return {"labels": address}

    monkeypatch.setattr(services, "get_node", get_node)
    monkeypatch.setattr(ray_processes, "RAY_NODE_TIMEOUT_S", 0.0)
    with wait_longer_for_node(60.0, said.append):
        assert services.get_node("here") == {"labels": "here"}
    assert services.get_node is get_node
    assert len(said) == 1
    assert "60 s" in said[0]
    asked.clear()
    with pytest.raises(RuntimeError), wait_longer_for_node(0.0, said.append):
        services.get_node("here")
