"""``vllm bench serve`` measures this server as it would vLLM's own, speculation included."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.exhaustive, pytest.mark.engine, pytest.mark.timeout(900)]

LAUNCHER = Path(__file__).parents[1] / "support" / "vllm_bench_serve.py"
REQUESTS = 20


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_twenty_requests(pair, tmp_path, backend):
    endpoint = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}[backend]
    options = {
        "--backend": backend,
        "--base-url": pair.http_url,
        "--endpoint": endpoint,
        "--model": pair.config.served_model_name,
        "--tokenizer": pair.config.target.model,
        "--dataset-name": "random",
        "--random-input-len": "24",
        "--random-output-len": "16",
        "--num-prompts": str(REQUESTS),
        "--max-concurrency": "4",
        "--result-dir": str(tmp_path),
        "--result-filename": "result.json",
    }
    arguments = [part for option in options.items() for part in option]
    command = [sys.executable, str(LAUNCHER), *arguments, "--save-result", "--ignore-eos", "--disable-tqdm"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": ""})
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["completed"] == REQUESTS, result
    assert result["total_output_tokens"] == 16 * REQUESTS
    assert result["spec_decode_draft_tokens"] > 0
    assert 1 < result["spec_decode_acceptance_length"] <= 9
