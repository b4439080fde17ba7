"""The checkpoints of one profile, written where a run can find them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.bench.emulation.checkpoint import write_checkpoint
from tests.bench.emulation.emulation import Emulation
from tests.bench.emulation.profiles import Profile
from tests.bench.emulation.text_process import Text

VOCAB_SIZE = 2048
"""Logits are the one thing here whose real cost grows: at 32 requests and K = 4, vLLM in-process, 32,768 tokens cost
42 ms a round more than 4,096 do, on two cores."""


@dataclass(frozen=True)
class EmulatedPair:
    """Checkpoint directories of one profile, and where their models write traces."""

    target: Path
    drafter: Path
    drafter_in_process: Path
    traces: Path


def write_pair(directory: Path, profile: Profile, text: Text, polls: bool = False) -> EmulatedPair:
    traces = directory / "traces"
    traces.mkdir(parents=True)
    models = {
        "target": Emulation("target", profile.target, None, str(traces), polls),
        "drafter": Emulation("drafter", profile.drafter, text, str(traces), polls),
        "drafter-in-process": Emulation("drafter", profile.drafter_in_process, text, str(traces), polls),
    }
    for name, model in models.items():
        write_checkpoint(directory / name, model, vocab_size=VOCAB_SIZE)
    return EmulatedPair(directory / "target", directory / "drafter", directory / "drafter-in-process", traces)
