"""Every sampling parameter holds for every committed token, accepted, recovered and bonus alike: an answer with
speculation equals the one without (coupled and greedy), and shows the parameter's own effect.

vllm#9834, #19482 and #42744 are about parameters that drafted tokens escaped. Every parameter by itself, on tensors, is
in unit/vllm_adapter/test_target_sampler.py.
"""

import json
import re
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
import torch

from outrider.deploy.client.sync_client import OutriderError
from outrider.v1 import generation_pb2 as pb
from tests.support.cluster.serving import HANG_GUARD_S, K, drafted, num_accepted, wait_until_idle
from tests.support.models.reference import TIE, Coupled

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

PROMPT = list(b"It was the best of times, it was the worst of times, it was")
NUM_TOKENS = 48
EOS = 256
SAMPLED = {"temperature": 1.0, "seed": 21}
GREEDY = {"temperature": 0.0}


def ask(pair, speculation=True, **options):
    settings = {"max_tokens": NUM_TOKENS, "ignore_eos": True, **options}
    return pair.client.generate(PROMPT, speculation=speculation, **settings)


def swept(*values, kept):
    """Parameters of which make test takes one: what they do to tokens, and how tokens are chosen, do not meet."""
    return [value if value == kept else pytest.param(value, marks=pytest.mark.exhaustive) for value in values]


def logits_before(pair, answer):
    """Return float64 logits of another implementation at each token of an answer, [tokens, vocabulary]."""
    return pair.reference.logits_along(torch.tensor([[*PROMPT, *answer]]))[0, len(PROMPT) - 1 : -1].double()


@pytest.fixture
def on_and_off(pair):
    """The answer with speculation. Fails unless it is the answer without, and drafts were accepted on the way."""

    def both(must_accept=True, **options):
        on = drafted(lambda: ask(pair, **options), num_accepted) if must_accept else ask(pair, **options)
        off = ask(pair, speculation=False, **options)
        same = list(on.token_ids) == list(off.token_ids)
        if not same:
            at = next(i for i, (a, b) in enumerate(zip(on.token_ids, off.token_ids, strict=False)) if a != b)
            raise AssertionError(
                f"different from token {at} on: {on.token_ids[at : at + 4]} and {off.token_ids[at : at + 4]}"
            )
        assert (on.finish_reason, on.stop_reason, on.text) == (off.finish_reason, off.stop_reason, off.text)
        assert on.usage.completion_tokens == off.usage.completion_tokens == len(on.token_ids)
        assert off.metrics.speculative_decoding.num_draft_tokens == 0
        return on

    return both


@pytest.fixture
def free(pair):
    """Return the answers without any further parameter: what a parameter has to change."""
    return {"sampled": list(ask(pair, **SAMPLED).token_ids), "greedy": list(ask(pair, **GREEDY).token_ids)}


@pytest.mark.parametrize("verification", ["rejection", pytest.param("block", marks=pytest.mark.exhaustive), "coupled"])
@pytest.mark.parametrize("constraint", [{"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.3}], ids=str)
def test_no_token_comes_from_outside_the_constraint(pair, verification, constraint):
    """vllm#42744: min_p did not reach drafted tokens. Checked against another implementation's probabilities."""
    answer = list(ask(pair, temperature=1.2, verification=verification, **constraint).token_ids)
    for position, (token, logits) in enumerate(zip(answer, logits_before(pair, answer) / 1.2, strict=True)):
        probs = logits.softmax(-1)
        likelier = probs[probs > probs[token]]
        if "top_k" in constraint:
            allowed = logits[token] >= logits.topk(constraint["top_k"]).values[-1] - TIE
        elif "top_p" in constraint:
            allowed = likelier.sum() < constraint["top_p"] + TIE
        else:
            allowed = probs[token] > constraint["min_p"] * probs.max() - TIE
        assert allowed, f"token {position} is {token}, with probability {probs[token]:.3g}"


@pytest.mark.parametrize("how", [SAMPLED, GREEDY], ids=["sampled", "greedy"])
def test_min_tokens_holds_the_stop_back_inside_a_block(on_and_off, free, how):
    unstopped = free["greedy" if how is GREEDY else "sampled"]
    at = next(i for i in range(2, NUM_TOKENS) if unstopped[i] not in unstopped[:i])
    stop = unstopped[at]
    early = on_and_off(must_accept=False, **how, stop_token_ids=[stop])
    assert list(early.token_ids) == unstopped[: at + 1]
    assert early.finish_reason == pb.FINISH_REASON_STOP
    late = on_and_off(**how, stop_token_ids=[stop], min_tokens=20)
    assert stop not in list(late.token_ids)[:20]
    assert len(late.token_ids) >= 20


def test_a_stop_string_leaves_what_plain_decoding_leaves(on_and_off):
    """What comes after the stop in the same round was accepted by the target, but is no part of the answer."""
    text = on_and_off(**SAMPLED).text
    threes = [text[at : at + 3] for at in range(24, len(text) - 3)]
    stop = next(three for three in threes if three.isascii() and text.find(three) >= 24)
    answer = on_and_off(**SAMPLED, stop=stop)
    assert answer.text == text[: text.find(stop)]
    assert (answer.finish_reason, answer.stop_reason) == (pb.FINISH_REASON_STOP, stop)


def test_logprobs_are_the_model_s_own_for_every_token(pair):
    options = {**SAMPLED, "logprobs": 3, "logit_bias": {65: 2.0}, "top_p": 0.9}
    on, off = drafted(lambda: ask(pair, **options), num_accepted), ask(pair, speculation=False, **options)
    entries, plain = on.completions[0].logprobs, off.completions[0].logprobs
    assert len(entries) == len(plain) == NUM_TOKENS
    along = logits_before(pair, list(on.token_ids)).log_softmax(-1)
    for token, raw, entry, other in zip(on.token_ids, along, entries, plain, strict=True):
        assert entry.token_id == other.token_id == token
        assert entry.logprob == pytest.approx(float(raw[token]), abs=1e-3)
        assert entry.logprob == pytest.approx(other.logprob, abs=1e-3)
        assert len(entry.top) == 3
        assert entry.top[0].logprob == pytest.approx(float(raw.max()), abs=1e-3)
        assert int((raw > raw[token] + TIE).sum()) < entry.rank <= int((raw > raw[token] - TIE).sum())


def test_prompt_logprobs(pair):
    answer = ask(pair, **SAMPLED, prompt_logprobs=1)
    entries = answer.prompt_logprobs
    assert len(entries) == len(PROMPT)
    assert entries[0].rank == 0
    for position in (1, 7, len(PROMPT) - 1):
        raw = pair.reference.logits(PROMPT[:position]).log_softmax(-1)
        assert entries[position].token_id == PROMPT[position]
        assert entries[position].logprob == pytest.approx(float(raw[PROMPT[position]]), abs=1e-3)


def test_n_answers_are_those_of_the_seeds_that_follow(pair):
    """vllm#6038, #9441, #13196: seeds ignored, or mixed up in a batch."""
    together = drafted(
        lambda: ask(pair, temperature=1.0, seed=40, n=3),
        lambda answer: min(num_accepted(completion) for completion in answer.completions),
    )
    assert len(together.completions) == 3
    for index, completion in enumerate(together.completions):
        pair.reference.check(PROMPT, completion.token_ids, label=f"answer {index}", choice=Coupled(40 + index))
    assert together.usage.completion_tokens == 3 * NUM_TOKENS
    unseeded = ask(pair, temperature=1.0, n=3)
    assert len({tuple(completion.token_ids) for completion in unseeded.completions}) == 3


SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["alpha", "beta"]}, "count": {"enum": [1, 22, 333]}},
    "required": ["name", "count"],
    "additionalProperties": False,
}
TURNS, FRUIT = ("go left now", "go right now"), ["red apple", "red pear", "green pear"]
STRUCTURES = {
    "json": ({"json_schema": SCHEMA}, lambda text: json.loads(text)["count"] in (1, 22, 333)),
    "regex": ({"regex": r"[a-c]{6}-[0-9]{4}"}, lambda text: re.fullmatch(r"[a-c]{6}-[0-9]{4}", text)),
    "grammar": ({"grammar": 'root ::= "go " ("left" | "right") " now"'}, lambda text: text in TURNS),
    "choice": ({"choice": FRUIT}, lambda text: text in FRUIT),
    "guidance": (
        {"json_schema": {"type": "integer", "multipleOf": 7, "minimum": 10, "maximum": 9999}},
        lambda text: int(text) % 7 == 0,
    ),
}


@pytest.mark.parametrize("how", swept(SAMPLED, GREEDY, kept=SAMPLED), ids=["sampled", "greedy"])
@pytest.mark.parametrize("kind", STRUCTURES)
def test_structured_outputs(on_and_off, kind, how):
    """vllm#49694, #54437: the scheduler cuts drafts where the grammar forbids them, and what is cut must not matter."""
    constraint, is_valid = STRUCTURES[kind]
    answer = on_and_off(must_accept=False, **how, **constraint, ignore_eos=False)
    assert is_valid(answer.text), answer.text
    assert answer.finish_reason == pb.FINISH_REASON_STOP


LETTERS = {"regex": r"[a-e]{40}"}
LETTERS_BY_GUIDANCE = {"json_schema": {"type": "string", "pattern": r"^[a-e]{40}$", "minLength": 40}}


@pytest.mark.parametrize(
    ("how", "constraint"),
    [(SAMPLED, LETTERS), (GREEDY, LETTERS), (SAMPLED, LETTERS_BY_GUIDANCE)],
    ids=["sampled", "greedy", "sampled-guidance"],
)
def test_a_grammar_cuts_drafts_and_changes_no_token(on_and_off, how, constraint):
    """vllm#49694, #54437: the drafter does not know the grammar, so many of its drafts are cut, and some are not."""
    push = {**dict.fromkeys(range(97, 102), 9.0), 33: 8.0}
    answer = on_and_off(**how, **constraint, ignore_eos=False, logit_bias=push)
    assert re.fullmatch(r'"?[a-e]{40}"?', answer.text)
    speculative = answer.metrics.speculative_decoding
    assert 0 < speculative.num_draft_tokens < K * (speculative.num_spec_steps - 1), "nothing was cut"


def test_everything_at_once(on_and_off):
    answer = on_and_off(
        **{**SAMPLED, "temperature": 1.4},
        top_k=40,
        top_p=0.95,
        min_p=0.01,
        logit_bias={65: 2.0, 66: -100.0},
        repetition_penalty=1.2,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        allowed_token_ids=list(range(60, 120)),
        bad_words=["a"],
        min_tokens=30,
        stop_token_ids=[100],
    )
    assert set(answer.token_ids) <= set(range(60, 120)) - {66, 97}
    assert len(answer.token_ids) >= 30


def test_a_request_that_forbids_every_token_fails_alone(pair):
    """No token is left to choose: the request ends with a clear error, and the ones beside it with their answers."""
    with ThreadPoolExecutor(2) as pool:
        beside = pool.submit(ask, pair, **GREEDY)
        for how in (SAMPLED, GREEDY):
            with pytest.raises(OutriderError, match="allowed_token_ids: leaves no token") as failure:
                ask(pair, **how, allowed_token_ids=[65], bad_words=["A"], prompt_logprobs=1)
            assert failure.value.code is grpc.StatusCode.INVALID_ARGUMENT
        answer = beside.result()
    pair.reference.check(PROMPT, answer.token_ids, label="beside it")
    wait_until_idle(pair, HANG_GUARD_S)
