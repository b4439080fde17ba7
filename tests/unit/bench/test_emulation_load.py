"""Every request that is asked for runs, in a loop that ends when enough rounds were seen."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from tests.bench.emulation.in_process import carry
from tests.bench.emulation.load import Load


@dataclass
class Engine:
    """Ends its oldest request in every step."""

    waiting: list[tuple[str, int]] = field(default_factory=list)
    most: int = 0
    lost: int = 0

    def add_request(self, request_id: str, prompt: str, params: Any) -> None:
        self.waiting.append((request_id, params.max_tokens - self.lost))
        self.most = max(self.most, len(self.waiting))

    def has_unfinished_requests(self) -> bool:
        return bool(self.waiting)

    def step(self) -> list[Any]:
        _, tokens = self.waiting.pop(0)
        return [SimpleNamespace(finished=True, outputs=[SimpleNamespace(token_ids=[0] * tokens)])]


@pytest.mark.parametrize("batch", [1, 2, 8])
def test_every_requested_token_runs(batch: int) -> None:
    engine, more = Engine(), iter([False, False, True])
    answered = carry(engine, Load(batch, rounds=1, max_tokens=96), lambda: next(more, True))
    assert engine.most == batch
    # Two more than a batch: it was asked three times or oftener, and enough from the third time on.
    assert answered.tokens == 96 * (batch + 2)


def test_tokens_that_are_missing_end_the_measurement() -> None:
    with pytest.raises(RuntimeError, match="95 of 96 tokens"):
        carry(Engine(lost=1), Load(1, rounds=1, max_tokens=96), lambda: True)
