"""Several verified paths of a draft tree: the tokens are those of a run without speculation, and paths really ran."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster.serving import HANG_GUARD_S, PATH_ROUNDS, Deployment, wait_until
from tests.support.load.traffic import Traffic
from tests.support.models.offline_llm import run_jobs
from tests.support.models.tiny_models import build_one_pass, build_tiny_llama

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900), pytest.mark.usefixtures("one_thread")]

MAX_MODEL_LEN = 192
BLOCK = 128
"""Tokens of a KV block of the target, on CPU."""

BLOCK_BYTES = 2 * 2 * 2 * BLOCK * 32 * 4
"""Of keys and values, 2 layers, 2 heads of 32 float32 numbers."""

GREEDY, SEEDED = {"temperature": 0.0, "max_tokens": 64}, {"temperature": 1.0, "seed": 7, "max_tokens": 64}
TWO_ANSWERS = {**SEEDED, "n": 2, "presence_penalty": 0.5, "min_p": 0.02, "max_tokens": 24}


def prompts(count: int) -> list[list[int]]:
    """Lengths around the end of a block, and long enough to reach the end of the model's context; a quarter twice."""
    made = [list(b"%03d the future of %d is " % (n, n * n)) + [97 + n % 7] * (90 + n % 60) for n in range(count)]
    return [*made, *made[: count // 4]]


def job(models: Any, drafter: Path | None, count: int, **arguments: Any) -> dict[str, Any]:
    engine = {"dtype": "float32", "max_model_len": MAX_MODEL_LEN, "max_num_seqs": 8, "kv_cache_memory_bytes": 32 << 20}
    if drafter is not None:
        arguments["speculative_config"] = {
            "method": "draft_model",
            "model": str(drafter),
            "num_speculative_tokens": 4,
            "kv_cache_memory_bytes": 16 << 20,
            "num_paths": 4,
            "adaptive": False,
        }
    return {
        "arguments": {**engine, "model": str(models.target), **arguments},
        "prompts": prompts(count),
        "params": GREEDY,
        "further": [SEEDED, TWO_ANSWERS],
    }


def answers(found: dict[str, Any]) -> list[list[int]]:
    return [*found["tokens"], *(answer for of_params in found["further"] for each in of_params for answer in each)]


FEW_BLOCKS = {"max_num_seqs": 64, "kv_cache_memory_bytes": 40 * BLOCK_BYTES}
VARIANTS: dict[str, tuple[int, dict[str, Any], list[str]]] = {
    "one rank": (40, {}, []),
    "200 prompts": (160, {}, []),
    "a drafter that dies": (160, {}, ["kill"]),
    "two ranks": (40, {"tensor_parallel_size": 2}, []),
    "KV for fewer requests than run": (64, FEW_BLOCKS, []),
    "KV for fewer requests than run, and aborts": (64, FEW_BLOCKS, ["abort"]),
}


@pytest.mark.parametrize(
    "variant", [pytest.param(name, marks=[pytest.mark.exhaustive] if name != "one rank" else []) for name in VARIANTS]
)
def test_tokens_are_those_of_a_run_without_speculation(variant: str, models: Any, tmp_path: Path) -> None:
    count, arguments, faults = VARIANTS[variant]
    worse = build_tiny_llama(tmp_path / "worse", noise_of=models.target, noise=0.1)
    drafter = build_one_pass(tmp_path / "one-pass", worse)
    plain, found = run_jobs([job(models, None, count), {**job(models, drafter, count, **arguments), "faults": faults}])
    rounds = found["rounds"]
    assert rounds["path_rounds"] > 100, rounds
    assert rounds["path_rows"] > rounds["path_rounds"], "a request had two further paths at once"
    assert rounds["path_tokens"] > 20, "paths beside the main line were accepted"
    assert all(before < after for before, after in pairwise([0, *found["path_rounds"]])), "paths ran until the end"
    assert found["counters"]["vllm:prefix_cache_hits"] > 0
    assert (found["counters"]["vllm:num_preemptions"] > 0) == ("max_num_seqs" in arguments)
    assert any(
        len(prompt) + len(made) == MAX_MODEL_LEN for prompt, made in zip(prompts(count), plain["tokens"], strict=True)
    )
    cut = 0
    for made, whole in zip(answers(found), answers(plain), strict=True):
        assert made == whole[: len(made)]
        cut += made != whole
    assert (cut > 10, cut > 0) == ("abort" in faults,) * 2, f"{cut} requests were aborted in the middle"
    before, after = found["held"]
    assert before == after, "KV blocks and rows are given back"


TEXT = list(b"It was the best of times, it was the worst of times, it was")
SAMPLED = {"temperature": 1.0, "seed": 21}
SEVERAL: dict[str, dict[str, Any]] = {
    "logprobs": {**SAMPLED, "logprobs": 3},
    "prompt's logprobs": {**SAMPLED, "prompt_logprobs": 1},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "bias": {**SAMPLED, "logit_bias": {65: 2.0, 66: -100.0}},
    "bad words": {"temperature": 0.0, "bad_words": ["a", "it", " w"]},
    "allowed ids": {**SAMPLED, "allowed_token_ids": list(range(60, 120))},
    "fewest tokens": {"temperature": 0.0, "min_tokens": 30, "stop_token_ids": list(range(97, 123))},
    "stop string": {**SAMPLED, "stop": "never there"},
    "cut to the likeliest": {**SAMPLED, "top_k": 40, "top_p": 0.95, "min_p": 0.01},
}
ONLY_ONE = {"temperature": 1.5, "top_k": 1}
CHAINS: dict[str, tuple[dict[str, Any], str]] = {
    "regex": ({**SAMPLED, "regex": "[a-c]{40}"}, "structured_output"),
    "schema": ({"temperature": 0.0, "json_schema": {"enum": ["alpha", "beta"]}}, "structured_output"),
    "rejection": ({**ONLY_ONE, "verification": "rejection"}, "verification"),
    "block": ({**ONLY_ONE, "verification": "block"}, "verification"),
}


def test_each_kind_of_request_has_the_tokens_it_has_without_speculation(paths: Deployment) -> None:
    """What cannot verify several paths takes the chain, and is counted by the reason."""

    def ask(options: dict[str, Any], **more: Any) -> Any:
        whole = "json_schema" not in options
        return paths.client.generate(TEXT, max_tokens=48, ignore_eos=whole, **options, **more)

    def chains() -> dict[str, float]:
        reasons = ("structured_output", "verification")
        return {reason: paths.metric("outrider:chain_requests_total", reason=reason) for reason in reasons}

    kinds = {**SEVERAL, **{name: options for name, (options, _) in CHAINS.items()}}
    plain = {name: ask(options, speculation=False) for name, options in kinds.items()}
    counted = chains()
    with Traffic(paths, TEXT, 200, callers=2), ThreadPoolExecutor(len(kinds)) as pool:
        found = dict(zip(kinds, pool.map(ask, kinds.values()), strict=True))
    for name, answer in found.items():
        assert list(answer.token_ids) == list(plain[name].token_ids), name
        logprobs = [[entry.logprob for entry in each.completions[0].logprobs] for each in (answer, plain[name])]
        assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-3)
    for _, reason in CHAINS.values():
        counted[reason] += 1
    wait_until(lambda: chains() == counted, HANG_GUARD_S, "the chains counted")
    for name, options in SEVERAL.items():
        before = paths.metric(PATH_ROUNDS)
        ask(options)
        wait_until(lambda: paths.metric(PATH_ROUNDS) > before, HANG_GUARD_S, f"paths: {name}")  # noqa: B023
