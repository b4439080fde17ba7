"""What a start-up costs: no heavy imports where nothing needs them."""

from __future__ import annotations

import json
import subprocess
import sys

LIGHT = (
    "outrider.deploy.cli.serve",
    "outrider.deploy.server",
    "outrider.deploy.app",
    "outrider.actors.serving.replica",  # its class; the replica itself imports vLLM when it is made
    "outrider.actors.serve_adapter.proxy",
    "outrider.actors.serving.http.app",
    "outrider.actors.serve_adapter.request_router",
    "outrider.actors.drafter.actor",
    "outrider.actors.drafter.ngram",
    "outrider.actors.drafter.suffix",
)
"""What the command, Serve's controller and proxies, the ingress and a look-up drafter import."""

HEAVY = ("vllm", "torch", "transformers")

LOOK_UP_DRAFTERS = """
from outrider.actors.drafter.load import load_proposer, warm_up
from outrider.cluster.config import NgramConfig, SpeculationConfig, SuffixConfig
for config in (NgramConfig(method="ngram"), SuffixConfig(method="suffix")):
    warm_up(load_proposer(config, SpeculationConfig(), None, None), SpeculationConfig().draft_top_n)
"""


def heavy_after(code: str, heavy: tuple[str, ...] = HEAVY) -> list[str]:
    code += f"\nimport json, sys; print(json.dumps([name for name in {heavy!r} if name in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_only_engines_import_vllm_and_torch() -> None:
    """Nor do the drafters that look up, when they are loaded."""
    assert heavy_after("\n".join([*(f"import {module}" for module in LIGHT), LOOK_UP_DRAFTERS])) == []
