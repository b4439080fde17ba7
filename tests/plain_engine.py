"""Greedy tokens from one plain vLLM engine: `python plain_engine.py MODEL '[[prompt ids], …]' MAX_TOKENS`.

A process of its own, because an engine in the test's process would stay there. The last line of stdout is JSON.
"""

import json
import sys


def main() -> None:
    from vllm import LLM, SamplingParams

    model, prompts, max_tokens = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
    engine = LLM(model, dtype="float32", enforce_eager=True, max_model_len=1024, kv_cache_memory_bytes=64 << 20)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    outputs = engine.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    print(json.dumps([list(output.outputs[0].token_ids) for output in outputs]), flush=True)


if __name__ == "__main__":
    main()
