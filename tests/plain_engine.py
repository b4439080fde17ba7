"""Greedy tokens from one plain vLLM engine, of a process of its own.

    python plain_engine.py MODEL '[[prompt ids], …]' MAX_TOKENS ADAPTERS ENGINE_ARGS

ADAPTERS: JSON, a LoRA adapter's directory or null for each prompt, or []. ENGINE_ARGS: JSON, vLLM's.

It is one of its own, because an engine in the test's process would stay there. The last line of stdout is JSON.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def greedy_tokens(
    model: Path,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    adapters: Sequence[Path | None] | None = None,
    **engine_args: Any,
) -> list[list[int]]:
    """One answer a prompt. adapters: of each prompt; None: none of any. engine_args: vLLM's."""
    paths = [None if path is None else str(path) for path in adapters or ()]
    given = [[list(prompt) for prompt in prompts], max_tokens, paths, engine_args]
    arguments = [str(model), *map(json.dumps, given)]
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
    from vllm.lora.request import LoRARequest

    model, prompts, max_tokens = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
    paths = json.loads(sys.argv[4])
    numbers = {path: number for number, path in enumerate(filter(None, dict.fromkeys(paths)), start=1)}
    # One slot stays empty: vLLM's CPU kernels answer prompts without an adapter with that of the last slot.
    lora = {"enable_lora": True, "max_loras": len(numbers) + 1, "max_lora_rank": 8} if numbers else {}
    ours = {"dtype": "float32", "enforce_eager": True, "max_model_len": 1024, "kv_cache_memory_bytes": 64 << 20}
    engine = LLM(model, **{**ours, **lora, **json.loads(sys.argv[5])})
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=bool(numbers))
    asked = [None if path is None else LoRARequest(path, numbers[path], path) for path in paths] or None
    outputs = engine.generate(
        [{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False, lora_request=asked
    )
    print(json.dumps([list(output.outputs[0].token_ids) for output in outputs]), flush=True)


if __name__ == "__main__":
    main()
