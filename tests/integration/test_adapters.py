"""Answers with LoRA adapters are plain vLLM's, and those of the model with the adapter in its weights, whatever drafts.

Three adapters and none are mixed in every batch. The drafter has the one called ``own``; without any it agrees with the
target often with ``near`` and seldom with ``far``.
"""

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch
from openai import NotFoundError, OpenAI

from tests.support.cluster.serving import HANG_GUARD_S, drafted, num_accepted, num_draft_tokens
from tests.support.models.plain_engine import greedy_tokens
from tests.support.models.reference import GREEDY, Coupled

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

NUM_TOKENS = 64
TEXT = b"It was the best of times, it was the worst of times, it was the age of wisdom. "
PROMPTS = [b"Hello world, this is", TEXT]
NAMES = ["near", "far", "own"]
WITH = (None, *NAMES)
BATCH = [(prompt, adapter) for prompt in PROMPTS for adapter in WITH]
CHOICES = {"greedy": GREEDY, "T=1": Coupled(seed=11), "T=0.7, top_p=0.95": Coupled(-12, temperature=0.7, top_p=0.95)}


def ask(deployment, prompt, adapter, choice, max_tokens=NUM_TOKENS, **changes):
    options = {**choice.options(), "max_tokens": max_tokens, "ignore_eos": True, **changes}
    return deployment.client.generate(list(prompt), adapter=adapter, **options)


def ask_all(deployment, choice, batch=BATCH, **changes):
    """At once."""
    with ThreadPoolExecutor(len(batch)) as threads:
        return list(threads.map(lambda one: ask(deployment, *one, choice, **changes), batch))


def reference(deployment, adapter):
    models = deployment.models
    return deployment.reference_of(models.target if adapter is None else models.merged[adapter])


def check(deployment, answers, choice, label, batch=BATCH):
    for (prompt, adapter), answer in zip(batch, answers, strict=True):
        reference(deployment, adapter).check(prompt, answer.token_ids, label=f"{label}, {adapter}", choice=choice)


def test_greedy_answers_are_plain_vllm_s(adapters):
    paths = [None if name is None else adapters.models.adapters[name] for _, name in BATCH]
    plain = greedy_tokens(adapters.models.target, [prompt for prompt, _ in BATCH], NUM_TOKENS, paths)
    for (prompt, name), answer, expected in zip(BATCH, ask_all(adapters, GREEDY), plain, strict=True):
        reference(adapters, name).check(prompt, answer.token_ids, expected, label=f"plain vLLM, {name}")


@pytest.mark.parametrize("name", CHOICES)
def test_with_a_draft_model_and_without(adapters, name):
    choice = CHOICES[name]
    answers = drafted(lambda: ask_all(adapters, choice), lambda all_: min(map(num_draft_tokens, all_)))
    check(adapters, answers, choice, name)
    assert sum(map(num_accepted, answers)) > 0
    plain = ask_all(adapters, choice, speculation=False)
    check(adapters, plain, choice, f"{name}, no drafts")
    assert sum(map(num_draft_tokens, plain)) == 0


def test_acceptance_differs_by_adapter_and_is_known_by_it(adapters):
    answers = {name: drafted(lambda name=name: ask(adapters, TEXT, name, GREEDY)) for name in WITH}
    rates = {name: num_accepted(answer) / num_draft_tokens(answer) for name, answer in answers.items()}
    assert rates["far"] < rates[None]
    assert rates["far"] < rates["near"]
    assert rates["far"] < rates["own"], "as far away, but the drafter has it too"


@pytest.mark.parametrize("name", ["greedy", "T=1"])
def test_with_two_ranks_steps_one_after_the_other_and_a_suffix_drafter(adapters_tp2, name):
    for number in range(2):  # the second time from what is remembered of the first
        answers = ask_all(adapters_tp2, CHOICES[name], max_tokens=48)
        check(adapters_tp2, answers, CHOICES[name], f"{name}, two ranks, {number}")


def test_a_prompt_s_logprobs_are_those_of_its_adapter(adapters):
    """vLLM's output head ends an engine with adapters that is asked for them, whether the request has one or not."""
    batch = [(TEXT, name) for name in WITH]
    for (prompt, name), answer in zip(
        batch, ask_all(adapters, GREEDY, batch, max_tokens=4, prompt_logprobs=1, logprobs=1), strict=True
    ):
        logits = reference(adapters, name).logits_along(torch.tensor([list(prompt)]))[0]
        expected = logits.log_softmax(-1)[:-1].gather(1, torch.tensor([list(prompt[1:])]).T).squeeze(1)
        found = [each.logprob for each in answer.prompt_logprobs[1:]]
        assert found == pytest.approx(expected.tolist(), abs=1e-3), name
    check(adapters, ask_all(adapters, GREEDY), GREEDY, "afterwards")


def test_over_openai_s_api(adapters):
    base = adapters.config.served_model_name
    with OpenAI(base_url=f"{adapters.http_url}/v1", api_key="none") as client:
        listed = {model.id: model for model in client.models.list()}
        assert list(listed)[:4] == [base, *NAMES]
        assert listed["near"].parent == base
        for name in (base, "near", "far"):
            answer = client.completions.create(
                model=name,
                prompt=list(TEXT),
                max_tokens=NUM_TOKENS,
                temperature=0,
                extra_body={"return_token_ids": True},
            )
            assert answer.model == name
            tokens = answer.choices[0].token_ids
            reference(adapters, None if name == base else name).check(TEXT, tokens, label=f"OpenAI, {name}")
        said = [{"role": "user", "content": "Name a colour."}]
        texts = {}
        for name in (base, "near", "far"):
            response = client.responses.create(model=name, input=said, max_output_tokens=16, temperature=0)
            chat = client.chat.completions.create(model=name, messages=said, max_tokens=16, temperature=0)
            assert (response.model, response.output_text) == (name, chat.choices[0].message.content)
            texts[name] = response.output_text
        assert len(set(texts.values())) == 3, "each answers by its own adapter"
        with pytest.raises(NotFoundError, match="`none` does not exist"):
            client.responses.create(model="none", input=said)


def test_status_lists_them_and_metrics_have_no_series_for_every_set_of_them(adapters):
    ask_all(adapters, GREEDY, max_tokens=4)
    scraped = httpx.get(f"{adapters.http_url}/metrics", timeout=60).text
    assert "vllm:num_requests_running{" in scraped
    assert "vllm:lora_requests_info{" not in scraped
    assert list(adapters.status().adapters) == sorted(NAMES)


def test_none_is_loaded_at_run_time_unless_vllm_is_told_to(adapters):
    """By the variable VLLM_ALLOW_RUNTIME_LORA_UPDATING, since the call takes any path that the server can read."""
    body = {"lora_name": "later", "lora_path": str(adapters.models.adapters["later"])}
    answer = httpx.post(f"{adapters.http_url}/v1/load_lora_adapter", json=body, timeout=HANG_GUARD_S)
    assert answer.status_code == 404
    assert list(adapters.status().adapters) == sorted(NAMES)
