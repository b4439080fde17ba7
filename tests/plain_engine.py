"""Greedy tokens from one plain vLLM engine: `python plain_engine.py MODEL '[[prompt ids], …]' MAX_TOKENS ENGINE_ARGS`.

A process of its own, because an engine in the test's process would stay there. The last line of stdout is JSON.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def greedy_tokens(
    model: Path, prompts: Sequence[Sequence[int]], max_tokens: int, **engine_args: Any
) -> list[list[int]]:
    """One answer a prompt. engine_args: vLLM's."""
    arguments = [str(model), json.dumps([list(ids) for ids in prompts]), str(max_tokens), json.dumps(engine_args)]
    done = subprocess.run(
        [sys.executable, __file__, *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        cwd=Path(__file__).parents[1],
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answers: list[list[int]] = json.loads(done.stdout.strip().splitlines()[-1])
    return answers


def main() -> None:
    from vllm import LLM, SamplingParams

    model, prompts, max_tokens = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
    ours = {"dtype": "float32", "enforce_eager": True, "max_model_len": 1024, "kv_cache_memory_bytes": 64 << 20}
    engine = LLM(model, **{**ours, **json.loads(sys.argv[4])})
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    outputs = engine.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    print(json.dumps([list(output.outputs[0].token_ids) for output in outputs]), flush=True)


if __name__ == "__main__":
    main()
