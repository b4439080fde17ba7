"""The checkpoints of one profile, written where a run can find them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

from tests.bench.emulation.checkpoint import write_checkpoint
from tests.bench.emulation.emulation import Emulation
from tests.bench.emulation.profiles import Profile
from tests.bench.emulation.text_process import Text

VOCAB_SIZE = 2048
"""Logits are the one thing here whose real cost grows: at 32 requests and K = 4, vLLM in-process, 32,768 tokens cost
42 ms a round more than 4,096 do, on two cores."""


MASK_TOKEN = VOCAB_SIZE - 1
"""In no lane, so that no text has it."""


@dataclass(frozen=True)
class EmulatedPair:
    """Checkpoint directories of one profile, and where their models write traces."""

    target: Path
    drafters: dict[tuple[bool, bool], Path]
    """By whether it is sharded over the target's accelerators, and whether it drafts in one pass."""

    traces: Path


def write_pair(directory: Path, profile: Profile, text: Text) -> EmulatedPair:
    traces = directory / "traces"
    traces.mkdir(parents=True)

    def write(name: str, model: Emulation) -> Path:
        return write_checkpoint(directory / name, model, vocab_size=VOCAB_SIZE)

    target = write("target", Emulation("target", profile.target, None, str(traces)))
    drafters = {}
    for sharded, one_pass in itertools.product((False, True), repeat=2):
        name = "drafter" + "-sharded" * sharded + "-one-pass" * one_pass
        time = profile.drafter_in_process if sharded else profile.drafter
        model = Emulation("drafter", time, text, str(traces), MASK_TOKEN if one_pass else None)
        drafters[sharded, one_pass] = write(name, model)
    return EmulatedPair(target, drafters, traces)
