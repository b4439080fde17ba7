"""What an emulated model is told: its step times, its checkpoint, and how vLLM finds its class."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from outrider.cluster.vocabulary import read_vocabulary
from outrider.deploy.models.check import check_same_tokens, vocab_size
from tests.bench.emulation.checkpoint import write_checkpoint
from tests.bench.emulation.emulation import KEY, Emulation
from tests.bench.emulation.plugin import environment
from tests.bench.emulation.profiles import PROFILES, TEXTS
from tests.bench.emulation.step_time import StepTime
from tests.bench.emulation.trace import TraceWriter, read_trace

DRAFTER = Emulation("drafter", PROFILES["70b-8b"].drafter, TEXTS["chat"], "/somewhere")


@pytest.mark.parametrize("emulation", [DRAFTER, Emulation("target", StepTime(1.0, 0.0))])
def test_a_checkpoint_gives_back_what_it_was_told(tmp_path: Path, emulation: Emulation) -> None:
    path = write_checkpoint(tmp_path / "model", emulation, vocab_size=600)
    assert Emulation.from_json(json.loads((path / "config.json").read_text())[KEY]) == emulation


def test_both_sides_of_a_pair_have_the_same_tokens(tmp_path: Path) -> None:
    target = write_checkpoint(tmp_path / "target", Emulation("target", StepTime(1.0, 0.0)), vocab_size=600)
    drafter = write_checkpoint(tmp_path / "drafter", DRAFTER, vocab_size=600)
    assert tuple(vocab_size(json.loads((path / "config.json").read_text())) for path in (target, drafter)) == (
        600,
        600,
    )
    vocabularies = read_vocabulary(str(target)), read_vocabulary(str(drafter))
    assert vocabularies[0] is not None
    assert vocabularies[1] is not None
    assert len(vocabularies[0]) == 600
    check_same_tokens(vocabularies[0], vocabularies[1])


def test_nothing_else_of_this_tree_comes_along(tmp_path: Path) -> None:
    """A server of another tree must find this instrument and its own code."""
    (tmp_path / "elsewhere").mkdir()
    code = "; ".join(
        [
            "from importlib.util import find_spec",
            "print(*(find_spec(name).origin for name in ('tests', 'tests.bench.emulation.plugin')))",
            "print(find_spec('cluster'), find_spec('tests.unit'))",
        ]
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={**os.environ, **environment(tmp_path / "plugin")},
        cwd=tmp_path / "elsewhere",
        capture_output=True,
        text=True,
        check=True,
    )
    package = tmp_path / "plugin" / "tests"
    found = [str(package / "__init__.py"), str(package / "bench" / "emulation" / "plugin.py"), "None", "None"]
    assert done.stdout.split() == found


def test_a_trace_holds_the_steps_of_its_role_and_time(tmp_path: Path) -> None:
    for role, starts in (("target", (3.0, 1.0, 2.0)), ("drafter", (1.5,))):
        writer = TraceWriter(tmp_path, role)
        for step, start in enumerate(starts):
            times = (start, start, start, start + 0.1, start + 0.1, start + 0.2)
            writer.add(step, times, np.full(step + 1, 300 + step), np.arange(step + 1))
            writer.flush()
    trace = read_trace(tmp_path, "target", 1.0, 3.0)
    assert trace.forwards["started_s"].tolist() == [1.0, 2.0]
    assert trace.forwards["step"].tolist() == [1, 2]
    assert trace.rows["token"].tolist() == [301, 301, 302, 302, 302]
    assert trace.rows["position"].tolist() == [0, 1, 0, 1, 2]
    assert trace.forward_of_row().tolist() == [0, 0, 1, 1, 1]
    assert len(read_trace(tmp_path, "nobody", 0.0, 9.0).forwards) == 0
