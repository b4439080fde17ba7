"""Greedy answers to chats, pictures and all, from one plain vLLM engine, of a process of its own.

    python plain_chats.py MODEL MAX_TOKENS < chats.json

The last line of stdout is JSON: of each chat its prompt's token ids and its answer's.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def greedy_answers(model: Path, chats: Sequence[Any], max_tokens: int) -> list[tuple[list[int], list[int]]]:
    """chats: lists of messages as OpenAI's API has them."""
    done = subprocess.run(
        [sys.executable, __file__, str(model), str(max_tokens)],
        input=json.dumps(chats),
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        cwd=Path(__file__).parents[1],
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [(prompt, answer) for prompt, answer in json.loads(done.stdout.strip().splitlines()[-1])]


def main() -> None:
    from vllm import LLM, SamplingParams

    engine = LLM(
        sys.argv[1],
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        kv_cache_memory_bytes=64 << 20,
        limit_mm_per_prompt={"image": 2},
    )
    params = SamplingParams(temperature=0.0, max_tokens=int(sys.argv[2]), ignore_eos=True)
    outputs = engine.chat(json.load(sys.stdin), params, use_tqdm=False)
    found = [(list(output.prompt_token_ids or ()), list(output.outputs[0].token_ids)) for output in outputs]
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
