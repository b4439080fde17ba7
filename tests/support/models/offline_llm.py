"""Runs ``outrider.LLM`` in a process of its own: jobs come as JSON on stdin, what they gave goes to stdout as JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

ROOT_OF_STDERR = 6000


def run_jobs(jobs: Sequence[Mapping[str, Any]], timeout_s: float = 600) -> list[dict[str, Any]]:
    """Returns for each job ``tokens`` (of each prompt), ``counters`` and, with ``num_paths``, ``rounds`` (the counts of
    the verifier), or ``error``: what ended it.

    A job has ``arguments`` of LLM, ``prompts`` as token ids, and ``params`` of SamplingParams; ``further`` ones, whose
    tokens come in a list of that name.
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

        def tokens(params: Mapping[str, Any]) -> list[list[int]]:
            outputs = llm.generate(prompts, SamplingParams(detokenize=False, **params), use_tqdm=False)
            return [[token for answer in output.outputs for token in answer.token_ids] for output in outputs]

        found = {"tokens": tokens(job["params"]), "further": [tokens(params) for params in job.get("further", ())]}
        counters = {}
        for metric in llm.get_metrics():
            if metric.name.startswith("vllm:spec_decode"):
                counters[metric.name] = getattr(metric, "value", None) or getattr(metric, "values", None)
        has_paths = "num_paths" in (job["arguments"].get("speculative_config") or {})
        statuses = llm.collective_rpc("round_status") if has_paths else []
        rounds = next((status["rounds"] for status in statuses if status is not None), {})
        return {**found, "counters": counters, "rounds": rounds}


def main() -> None:
    """Runs one job after the other on one Ray cluster."""
    import ray

    from outrider.deploy.ray_cluster import start_ray

    start_ray(16.0, print)
    print(json.dumps([_run(job) for job in json.loads(sys.stdin.read())]))
    ray.shutdown()


if __name__ == "__main__":
    main()
