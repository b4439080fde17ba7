"""Greedy tokens under co-located drafting, one engine after another: `python co_located_engines.py JOBS MAX_TOKENS`.

JOBS: JSON, a list of {name, config, prompts}, config being ours. Each engine is made from the arguments that our own
configuration gives vLLM, in this process, which pays for the imports once. A line of JSON for each job: its tokens and
what was drafted and accepted, or the error's type and text.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import traceback
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


def run(job: dict[str, Any], max_tokens: int) -> dict[str, Any]:
    from vllm import LLM, SamplingParams
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    from outrider.actors.vllm_adapter.engine_args import target_engine_arguments
    from outrider.cluster.config import parse_config

    arguments = target_engine_arguments(parse_config(job["config"]))
    engine = None
    try:
        engine = LLM(**arguments)
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
        answers = [output.outputs[0] for output in engine.generate(prompts, params, use_tqdm=False)]
        counted = [answer.spec_decode_metrics.to_dict() for answer in answers]
        return {
            "tokens": [list(answer.token_ids) for answer in answers],
            "drafted": sum(each["num_draft_tokens"] for each in counted),
            "accepted": sum(each["num_accepted_draft_tokens"] for each in counted),
        }
    finally:
        if engine is not None:
            with contextlib.suppress(AttributeError):  # what it is called differs between vLLM's clients
                engine.llm_engine.engine_core.shutdown()
        del engine
        cleanup_dist_env_and_memory()
        gc.collect()


def main() -> None:
    from vllm.platforms import current_platform  # noqa: F401 - sets up logging before stdout is taken over

    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for job in json.loads(sys.argv[1]):
        try:
            result = run(job, int(sys.argv[2]))
        except Exception as error:  # noqa: BLE001 - what vLLM raises is the result
            traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"name": job["name"], **result}), file=out, flush=True)


if __name__ == "__main__":
    main()
