"""Greedy answers from one plain vLLM engine, of a process of its own: one in the test's process would stay there.

    python plain_engine.py MODEL < request.json

The last line of stdout is JSON: of each prompt or chat its token ids, its answer's, and how many drafts vLLM's own
drafting made for it and accepted.
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
    """Return one answer a prompt. adapters: a LoRA directory a prompt, or None. engine_args: vLLM's."""
    paths = [None if path is None else str(path) for path in adapters or ()]
    request = {"prompts": [list(prompt) for prompt in prompts], "max_tokens": max_tokens, "adapters": paths}
    return [answer for _, answer, _ in _answers(model, {**request, "engine_args": engine_args})]


def drafted_and_accepted(
    model: Path, prompts: Sequence[Sequence[int]], max_tokens: int, **engine_args: Any
) -> tuple[int, int]:
    """Return how many drafts all greedy answers had, and how many were accepted. engine_args: vLLM's, with a
    ``speculative_config``."""
    counts_each = {"per_request_spec_decode_metrics": "summary", "disable_log_stats": False}
    request = {"prompts": [list(prompt) for prompt in prompts], "max_tokens": max_tokens, "ignore_eos": True}
    counted = [counts for *_, counts in _answers(model, {**request, "engine_args": {**counts_each, **engine_args}})]
    return sum(drafted for drafted, _ in counted), sum(accepted for _, accepted in counted)


def greedy_answers(model: Path, chats: Sequence[Any], max_tokens: int) -> list[tuple[list[int], list[int]]]:
    """Return the prompt and the answer of each chat, up to max_tokens whatever it says.

    chats: lists of messages as OpenAI's API has them, with up to two pictures each.
    """
    engine_args = {"limit_mm_per_prompt": {"image": 2}}
    request = {"chats": list(chats), "max_tokens": max_tokens, "engine_args": engine_args}
    return [(prompt, answer) for prompt, answer, _ in _answers(model, request)]


def _answers(model: Path, request: dict[str, Any]) -> list[tuple[list[int], list[int], tuple[int, int]]]:
    done = subprocess.run(
        [sys.executable, __file__, str(model)],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        cwd=Path(__file__).parents[3],
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [(prompt, answer, counts) for prompt, answer, counts in json.loads(done.stdout.strip().splitlines()[-1])]


def main() -> None:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    request = json.load(sys.stdin)
    paths = request.get("adapters", [])
    numbers = {path: number for number, path in enumerate(filter(None, dict.fromkeys(paths)), start=1)}
    # One slot stays empty: vLLM's CPU kernels answer prompts without an adapter with that of the last slot.
    lora = {"enable_lora": True, "max_loras": len(numbers) + 1, "max_lora_rank": 8} if numbers else {}
    ours = {"dtype": "float32", "enforce_eager": True, "max_model_len": 1024, "kv_cache_memory_bytes": 64 << 20}
    engine = LLM(sys.argv[1], **{**ours, **lora, **request["engine_args"]})
    chats = request.get("chats")
    ignore_eos = bool(numbers) or chats is not None or request.get("ignore_eos", False)
    params = SamplingParams(temperature=0.0, max_tokens=request["max_tokens"], ignore_eos=ignore_eos)
    if chats is not None:
        outputs = engine.chat(chats, params, use_tqdm=False)
    else:
        asked = [None if path is None else LoRARequest(path, numbers[path], path) for path in paths] or None
        prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
        outputs = engine.generate(prompts, params, use_tqdm=False, lora_request=asked)
    found = []
    for output in outputs:
        (answer,) = output.outputs
        counted = {} if answer.spec_decode_metrics is None else answer.spec_decode_metrics.to_dict()
        counts = [counted.get(f"num_{which}", 0) for which in ("draft_tokens", "accepted_draft_tokens")]
        found.append((list(output.prompt_token_ids or ()), list(answer.token_ids), counts))
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
