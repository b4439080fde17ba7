"""Answers with LoRA adapters are plain vLLM's, and those of the model with the adapter in its weights, whatever drafts.

Three adapters and none are mixed in every batch. The drafter has the one called ``own``; without any it agrees with the
target often with ``near`` and seldom with ``far``.
"""

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch
from openai import NotFoundError, OpenAI
from safetensors.torch import load_file, save_file

from outrider.deploy.client.sync_client import OutriderError
from tests.plain_engine import greedy_tokens
from tests.reference import GREEDY, Coupled
from tests.serving import HANG_GUARD_S, drafted, num_accepted, num_draft_tokens, wait_until
from tests.tiny_models import build_tiny_adapter

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


def test_the_adapters_answer_differently(adapters):
    for prompt in PROMPTS:
        assert len({tuple(reference(adapters, name).greedy(prompt, NUM_TOKENS)) for name in WITH}) == len(WITH)


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


def test_with_a_drafter_that_is_killed(adapters):
    """In the middle of every answer, and a new one is there afterwards."""
    adapters.linked()
    long = 8 * NUM_TOKENS
    for choice in (GREEDY, CHOICES["T=1"]):
        epoch = adapters.linked().epoch
        with ThreadPoolExecutor(len(BATCH)) as threads:
            streams = [
                adapters.client.stream(list(prompt), adapter=name, max_tokens=long, ignore_eos=True, **choice.options())
                for prompt, name in BATCH
            ]
            begun = [next(iter(stream)) for stream in streams]
            adapters.signal_drafter(signal.SIGKILL)
            rest = list(threads.map(list, streams))
        for (prompt, name), first, others in zip(BATCH, begun, rest, strict=True):
            tokens = [token for message in (first, *others) for token in message.token_ids]
            assert len(tokens) == long
            reference(adapters, name).check(prompt, tokens, label=f"killed, {name}", choice=choice)
        adapters.linked(epoch_after=epoch)


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


def test_prefixes_are_cached_for_each_adapter_alone(adapters):
    prompt = bytes(range(65, 90)) * 12
    for name in WITH:
        assert ask(adapters, prompt, name, GREEDY, max_tokens=2).usage.cached_tokens == 0
    for name in WITH:
        assert ask(adapters, prompt, name, GREEDY, max_tokens=2).usage.cached_tokens > 0


def test_a_name_that_there_is_not_is_refused_by_both_apis(adapters):
    with pytest.raises(OutriderError, match="adapter: 'none' is not known here; send one of 'near', 'far', 'own'"):
        ask(adapters, b"a", "none", GREEDY)
    answer = httpx.post(f"{adapters.http_url}/v1/completions", json={"model": "none", "prompt": "a"}, timeout=60)
    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "model")
    assert "near, far, own" in answer.json()["error"]["message"]


def test_over_openai_s_api(adapters):
    base = adapters.config.served_model_name
    with OpenAI(base_url=f"{adapters.http_url}/v1", api_key="none") as client:
        listed = {model.id: model for model in client.models.list()}
        assert list(listed)[:4] == [base, *NAMES]
        assert listed["near"].parent == base
        assert client.models.retrieve("far").id == "far"
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
        chat = client.chat.completions.create(
            model="far", messages=[{"role": "user", "content": "Name a colour."}], max_tokens=8, seed=3
        )
        assert chat.model == "far"
        said = [{"role": "user", "content": "Name a colour."}]
        texts = {}
        for name in (base, "near", "far"):
            response = client.responses.create(model=name, input=said, max_output_tokens=16, temperature=0)
            chat = client.chat.completions.create(model=name, messages=said, max_tokens=16, temperature=0)
            assert (response.model, response.output_text) == (name, chat.choices[0].message.content)
            texts[name] = response.output_text
        assert len(set(texts.values())) == 3, "each answers by its own adapter"
        with pytest.raises(NotFoundError, match=r"Valid names: .*near, far, own"):
            client.responses.create(model="none", input=said)


def test_status_lists_them_and_metrics_have_no_series_for_every_set_of_them(adapters):
    ask_all(adapters, GREEDY, max_tokens=4)
    scraped = httpx.get(f"{adapters.http_url}/metrics", timeout=60).text
    assert "vllm:num_requests_running{" in scraped
    assert "vllm:lora_requests_info{" not in scraped
    assert list(adapters.status().adapters) == NAMES


def load(deployment, name, path):
    body = {"lora_name": name, "lora_path": str(path)}
    return httpx.post(f"{deployment.http_url}/v1/load_lora_adapter", json=body, timeout=HANG_GUARD_S)


def unload(deployment, name):
    return httpx.post(f"{deployment.http_url}/v1/unload_lora_adapter", json={"lora_name": name}, timeout=HANG_GUARD_S)


def problem(answer, status=400):
    assert answer.status_code == status, answer.text
    return f"{answer.json()['error']['param']}: {answer.json()['error']['message']}"


@pytest.fixture
def later(adapters):
    """Another adapter, loaded while the server runs."""
    answer = load(adapters, "later", adapters.models.adapters["later"])
    assert answer.status_code == 200, answer.text
    yield adapters
    unload(adapters, "later")


def test_one_that_is_loaded_at_run_time_answers(later):
    answer = ask(later, TEXT, "later", GREEDY)
    reference(later, "later").check(TEXT, answer.token_ids, label="later")
    assert list(later.status().adapters) == [*NAMES, "later"]
    with OpenAI(base_url=f"{later.http_url}/v1", api_key="none") as client:
        assert "later" in [model.id for model in client.models.list()]
        assert client.completions.create(model="later", prompt="a", max_tokens=2).model == "later"


def test_what_cannot_be_loaded_is_refused_by_field(later, tmp_path):
    models = later.models
    assert "lora_name: " in problem(load(later, "later", models.adapters["later"]))
    assert "has been loaded already" in problem(load(later, "later", models.adapters["later"]))
    assert "taken by the configuration" in problem(load(later, "near", models.adapters["later"]))
    assert "taken by the configuration" in problem(load(later, later.config.served_model_name, models.adapters["near"]))
    assert "no name" in problem(load(later, "two words", models.adapters["near"]))
    said = problem(load(later, "more", models.adapters["near"]))
    assert said.startswith(
        "lora_path: lora_path: 4 adapters are loaded, which is all that target.lora.max_loras lets be"
    )
    assert "not beneath target.lora.load_from" in problem(load(later, "more", models.target))
    assert "not beneath target.lora.load_from" in problem(load(later, "more", "../tiny"))
    assert list(later.status().adapters) == [*NAMES, "later"], "nothing of it is left"
    assert "configuration" in problem(unload(later, "near"))
    assert "not loaded" in problem(unload(later, "more"), 404)


def test_an_adapter_of_another_rank_or_base_or_none_is_refused_at_run_time(adapters):
    beneath = adapters.models.adapters["near"].parent
    wide = build_tiny_adapter(beneath / "rank-16", adapters.models.target, rank=16)
    assert "its rank is 16, above target.lora.max_lora_rank (8)" in problem(load(adapters, "wide", wide))
    other = build_tiny_adapter(beneath / "other", adapters.models.target, modules=("lm_head",))
    weights = load_file(other / "adapter_model.safetensors")
    save_file(
        {name: tensor[:, :4].contiguous() for name, tensor in weights.items()}, other / "adapter_model.safetensors"
    )
    assert "it is of another model" in problem(load(adapters, "other", other))
    assert "is no directory" in problem(load(adapters, "none", beneath / "nothing"))
    unsupported = build_tiny_adapter(beneath / "dora", adapters.models.target)
    config = json.loads((unsupported / "adapter_config.json").read_text())
    (unsupported / "adapter_config.json").write_text(json.dumps({**config, "use_dora": True}))
    assert "vLLM does not yet support DoRA" in problem(load(adapters, "dora", unsupported))
    assert list(adapters.status().adapters) == NAMES
    check(adapters, ask_all(adapters, GREEDY), GREEDY, "after refusals")


def test_one_that_is_unloaded_answers_to_the_end_those_that_have_begun(later):
    long = 8 * NUM_TOKENS
    stream = later.client.stream(list(TEXT), adapter="later", max_tokens=long, ignore_eos=True, temperature=0.0)
    begun = next(iter(stream))
    assert unload(later, "later").status_code == 200
    with pytest.raises(OutriderError, match="adapter: 'later' is not known here"):
        ask(later, TEXT, "later", GREEDY)
    tokens = [token for message in (begun, *stream) for token in message.token_ids]
    assert len(tokens) == long
    reference(later, "later").check(TEXT, tokens, label="unloaded meanwhile")
    assert load(later, "later", later.models.adapters["later"]).status_code == 200, "its place is free"


def test_a_replica_that_starts_later_has_it_too(later):
    (before,) = later.replicas().items()
    os.kill(before[1], signal.SIGKILL)

    def replaced():
        try:
            return before[0] not in later.replicas() and later.status().adapters
        except OutriderError:
            return None

    assert list(wait_until(replaced, HANG_GUARD_S, "another replica")) == [*NAMES, "later"]
    answer = ask(later, TEXT, "later", GREEDY)
    reference(later, "later").check(TEXT, answer.token_ids, label="another replica")
