"""Runs ``outrider.LLM`` in a process of its own: jobs come as JSON on stdin, what they gave goes to stdout as JSON."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

ROOT_OF_STDERR = 6000
COUNTED = ("vllm:spec_decode", "vllm:num_preemptions", "vllm:prefix_cache_hits")
ABORTED_EACH_STEP = 0.1


def run_jobs(jobs: Sequence[Mapping[str, Any]], timeout_s: float = 600) -> list[dict[str, Any]]:
    """Returns for each job ``tokens`` (of each prompt) and ``counters``, or ``error``: what ended it.

    With ``num_paths`` also ``rounds``, the counts of the verifier, ``path_rounds`` after each of the parameters, and
    ``held`` at the start and at the end: free KV blocks, and the most requests that a rank's runner knows.

    A job has ``arguments`` of LLM, ``prompts`` as token ids, and ``params`` of SamplingParams; ``further`` ones, whose
    tokens come in a list of that name, by prompt and answer; ``faults``: ``abort`` ends requests early, whose tokens
    are those that came, ``kill`` the drafter in the middle of each of the parameters.
    """
    command = [sys.executable, "-m", "tests.support.models.offline_llm"]
    done = subprocess.run(command, input=json.dumps(list(jobs)), capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stderr[-ROOT_OF_STDERR:]
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def _run(job: Mapping[str, Any]) -> dict[str, Any]:
    from outrider import LLM, SamplingParams

    try:
        llm = LLM(**job["arguments"])
    except Exception as error:  # noqa: BLE001 - the test asks which
        return {"error": f"{type(error).__name__}: {error}"}
    with llm:
        prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]

        has_paths = "num_paths" in (job["arguments"].get("speculative_config") or {})
        path_rounds: list[int] = []

        def answers(params: Mapping[str, Any]) -> list[list[list[int]]]:
            sampling = SamplingParams(detokenize=False, **params)
            if faults := job.get("faults"):
                made = _with_faults(llm, prompts, sampling, faults)
            else:
                outputs = llm.generate(prompts, sampling, use_tqdm=False)
                made = [[list(answer.token_ids) for answer in output.outputs] for output in outputs]
            if has_paths:
                path_rounds.append(_status(llm)["rounds"]["path_rounds"])
            return made

        held = [_held(llm)] if has_paths else []
        found: dict[str, Any] = {"tokens": [answer[0] for answer in answers(job["params"])]}
        found["further"] = [answers(params) for params in job.get("further", ())]
        counters = {}
        for metric in llm.get_metrics():
            if metric.name.startswith(COUNTED):
                counters[metric.name] = metric.value if hasattr(metric, "value") else getattr(metric, "values", None)
        if has_paths:
            found |= {"rounds": _status(llm)["rounds"], "path_rounds": path_rounds, "held": [*held, _held(llm)]}
        return {**found, "counters": counters}


def _status(llm: Any) -> dict[str, Any]:
    found: dict[str, Any] = next(each for each in llm.collective_rpc("round_status") if each is not None)
    return found


def _held(llm: Any) -> list[int]:
    """Returns the free KV blocks, and how many requests the ranks' runners know when another one has run."""
    from outrider import SamplingParams

    llm.generate([{"prompt_token_ids": [1]}], SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
    pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    return [pool.get_num_free_blocks(), max(llm.collective_rpc(lambda worker: len(worker.model_runner.requests)))]


def _with_faults(llm: Any, prompts: Sequence[Any], sampling: Any, faults: Sequence[str]) -> list[list[list[int]]]:
    """Serves all prompts while `faults` happen. Afterwards the drafter is linked again."""
    from tests.support.cluster.serving import living_actors

    engine, chance = llm.llm_engine, random.Random(len(prompts))
    made: list[list[list[int]]] = [[[] for _ in range(sampling.n)] for _ in prompts]
    before, killed, live = _status(llm), False, {str(number) for number in range(len(prompts))}
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, sampling.clone())
    while engine.has_unfinished_requests():
        for output in engine.step():
            for answer in output.outputs:
                made[int(output.request_id)][answer.index] = list(answer.token_ids)
            if output.finished:
                live.discard(output.request_id)
        if "abort" in faults and live and chance.random() < ABORTED_EACH_STEP:
            engine.abort_request([gone := chance.choice(sorted(live))])
            live.discard(gone)
        if "kill" in faults and not killed and len(live) < len(prompts) * 2 / 3:
            assert _status(llm)["rounds"]["path_rounds"] > before["rounds"]["path_rounds"]
            (drafter,) = (pid for name, pid in living_actors() if name.startswith("Drafter:"))
            os.kill(drafter, signal.SIGKILL)
            killed = True
    while killed and not ((link := _status(llm)["link"])["state"] == "up" and link["epoch"] > before["link"]["epoch"]):
        time.sleep(0.1)
    return made


def main() -> None:
    """Runs one job after the other on one Ray cluster."""
    import ray

    from outrider.deploy.ray_cluster import start_ray

    start_ray(16.0, print)
    print(json.dumps([_run(job) for job in json.loads(sys.stdin.read())]))
    ray.shutdown()


if __name__ == "__main__":
    main()
