"""``LLM``, ``AsyncLLM`` and ``outrider run-batch``: vLLM's own tokens, whatever happens to weights and processes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.cluster.serving import HANG_GUARD_S, wait_until
from tests.support.models.offline_llm import run_jobs
from tests.support.models.reference import TIE, Reference
from tests.support.models.tiny_models import build_tiny_llama
from tests.support.models.updating_llm import run_updates

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900), pytest.mark.usefixtures("one_thread")]

UPDATES = 20
MAX_TOKENS = 60
REQUESTS = 60
ENGINE = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 4, "kv_cache_memory_bytes": 16 << 20}


def speculative_config(models):
    draft_model = {"method": "draft_model", "model": str(models.drafter), "kv_cache_memory_bytes": 16 << 20}
    return {**draft_model, "num_speculative_tokens": 3}


def arguments(models):
    return {**ENGINE, "model": str(models.target), "speculative_config": speculative_config(models)}


@pytest.mark.exhaustive
def test_tokens_are_those_of_vllms_llm(models, plain_vllm):
    prompts = [list(b"%d: the future of %d is" % (number, number * number)) for number in range(32)]
    params = {"temperature": 0.0, "max_tokens": 32}
    [found] = run_jobs([{"arguments": arguments(models), "prompts": prompts, "params": params}])
    assert found["tokens"] == plain_vllm(prompts, 32)


def test_weights_change_under_load(models, tmp_path):
    """Each token is the choice of the weights in service, and no request is lost. Requests go on across an update."""
    new = build_tiny_llama(tmp_path / "new", noise_of=models.target, noise=0.3)
    weights = [models.target, new]
    job = {
        "arguments": {**arguments(models), "weight_transfer_config": {"backend": "checkpoint"}},
        "checkpoints": [str(weights[number % 2]) for number in range(1, UPDATES + 1)],
        "max_tokens": MAX_TOKENS,
    }
    requests = run_updates(job)
    references = [Reference(each) for each in weights]
    assert len(requests) > 2 * UPDATES
    for request in requests:
        assert (request["reason"], len(request["tokens"])) == ("length", MAX_TOKENS)
        assert 1 < request["outputs"] <= MAX_TOKENS, "an answer comes as a stream"
        assert is_of_the_weights_in_service(request, references), request
    across = sum(request["first"] < request["last"] for request in requests)
    assert across > 0
    print(f"{UPDATES} updates; {len(requests)} requests, {across} across one: none lost, each token right")


def is_of_the_weights_in_service(request, references):
    """Whether one update after the other, within the request's own time, explains each of its tokens."""
    prompt, tokens, update = request["prompt"], torch.tensor(request["tokens"]), request["first"]
    text = torch.tensor([[*prompt, *request["tokens"]]])
    chosen = []
    for reference in references:
        logits = reference.logits_along(text)[0, len(prompt) - 1 : -1]
        chosen.append(logits.gather(1, tokens[:, None])[:, 0] > logits.max(1).values - TIE)
    for position in range(len(tokens)):
        if not chosen[update % 2][position]:
            update += 1
            if update > request["last"] or not chosen[update % 2][position]:
                return False
    return True


@pytest.mark.exhaustive
def test_a_batch_that_is_killed_goes_on(models, tmp_path):
    """What has an answer keeps it, all others get theirs: nothing is lost, nothing is answered twice."""
    prompts = {f"r{number}": list(b"%d: one two one" % number) for number in range(REQUESTS)}
    asked = {"model": "m", "max_tokens": 40, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    given, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    given.write_text(
        "".join(
            json.dumps(
                {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": {**asked, "prompt": prompt}}
            )
            + "\n"
            for name, prompt in prompts.items()
        )
    )
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in ENGINE.items()]
    flags += ["--served-model-name=m", f"--speculative-config={json.dumps(speculative_config(models))}"]
    outrider = str(Path(sys.executable).with_name("outrider"))
    command = [outrider, "run-batch", str(models.target), "-i", str(given), "-o", str(out), *flags]

    def lines():
        return out.read_text().splitlines() if out.exists() else []

    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            wait_until(lambda: len(lines()) >= REQUESTS // 4 or process.poll() is not None, HANG_GUARD_S, "answers")
        finally:
            process.send_signal(signal.SIGKILL)
    kept = [line for line in out.read_text().splitlines(keepends=True) if line.endswith("\n")]
    assert REQUESTS // 4 <= len(kept) < REQUESTS

    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_GUARD_S, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"{REQUESTS - len(kept)} answered, 0 of them with an error" in done.stdout
    assert out.read_text().startswith("".join(kept))
    answers = [json.loads(line) for line in lines()]
    assert sorted(answer["custom_id"] for answer in answers) == sorted(prompts)
    reference = Reference(models.target)
    for answer in answers:
        tokens = answer["response"]["body"]["choices"][0]["token_ids"]
        assert tokens == reference.greedy(prompts[answer["custom_id"]], 40)
