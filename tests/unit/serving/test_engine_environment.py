"""What a target's replica finds in its environment when it starts vLLM."""

import os
import subprocess
import sys

SHOWN = """
from outrider.actors.serving.replica import _import_engine
_import_engine()
from vllm.v1.engine.core_client import VLLM_ENGINE_READY_TIMEOUT_S
print(VLLM_ENGINE_READY_TIMEOUT_S)
"""


def test_an_engine_has_an_hour_to_load_and_vllm_has_not_been_imported_before_that_was_said():
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_ENGINE_READY_TIMEOUT_S"}
    shown = subprocess.run([sys.executable, "-c", SHOWN], env=environment, capture_output=True, text=True, check=True)
    assert shown.stdout.split()[-1] == "3600"
