"""The target's sampling pipeline on tensors, with vLLM's own processors and no engine: every row, drafted or not, is
treated as the plain sampler treats a request whose output so far ends there."""

import itertools
import math
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch

from outrider.actors.round.request import PLACEHOLDER_TOKEN_ID, Draft, Request, sampling_of
from outrider.actors.verification.batch import Status
from outrider.cluster.link.messages import SparseQ

V, K = 40, 3


DRAFTS = [7, 8, 9]
OUTPUT = [4, 5, 5]
PROMPT = [1, 2, 3]
_NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def sampler():
    from vllm.config import VllmConfig
    from vllm.v1.sample.sampler import Sampler

    from outrider.actors.vllm_adapter.target_sampler import TargetSampler

    return TargetSampler(VllmConfig(), Sampler(), torch.device("cpu"))


def params(**changes):
    from vllm import SamplingParams

    made = SamplingParams(**{"temperature": 0.0, **changes})
    made._all_stop_token_ids = set(made.stop_token_ids)
    return made


@dataclass
class Part:
    """A request, and its part of a step."""

    request: Request
    drafts: list[int]
    q: SparseQ | None

    @property
    def params(self):
        return self.request.params


def requests_of(*all_params, drafts=DRAFTS, q=None):
    made = []
    for p in all_params:
        sampling = sampling_of(p, "rejection")
        request = Request(f"r{next(_NUMBERS)}", p, sampling, [*PROMPT, *OUTPUT], len(PROMPT))
        made.append(Part(request, list(drafts), q))
    return made


def choose(sampler, logits, parts, width=None):
    """Tokens and status, which come in one tensor. width: if it is more than these need."""
    drafts = [Draft(part.drafts, part.q) for part in parts]
    width = width or max(2, *(len(part.drafts) + 1 for part in parts), 0)
    output = sampler(logits, [part.request for part in parts], drafts, width, metadata_of(parts))
    chosen = output.sampled_token_ids
    output.sampled_token_ids = chosen[:, :-1]
    return output, chosen[:, -1]


def metadata_of(requests):
    """vLLM's metadata for these requests, as its input batch makes it."""
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata

    all_params = [request.params for request in requests]
    no_penalties = all(
        (p.presence_penalty, p.frequency_penalty, p.repetition_penalty) == (0.0, 0.0, 1.0) for p in all_params
    )
    mask = None
    if any(p.allowed_token_ids for p in all_params):
        mask = torch.zeros(len(requests), V, dtype=torch.bool)
        for row, p in zip(mask, all_params, strict=True):
            if p.allowed_token_ids:
                row[:] = True
                row[p.allowed_token_ids] = False
    logprobs = [p.logprobs for p in all_params if p.logprobs is not None]
    return SamplingMetadata(
        temperature=None,
        all_greedy=False,
        all_random=False,
        top_p=None,
        top_k=None,
        generators={},
        max_num_logprobs=max(logprobs, default=None),
        no_penalties=no_penalties,
        prompt_token_ids=None if no_penalties else torch.tensor([PROMPT] * len(requests)),
        frequency_penalties=torch.tensor([p.frequency_penalty for p in all_params]),
        presence_penalties=torch.tensor([p.presence_penalty for p in all_params]),
        repetition_penalties=torch.tensor([p.repetition_penalty for p in all_params]),
        output_token_ids=[],
        allowed_token_ids_mask=mask,
        bad_words_token_ids={i: p.bad_words_token_ids for i, p in enumerate(all_params) if p.bad_words_token_ids},
        logitsprocs=LogitsProcessors(),
        logprob_token_ids={i: p.logprob_token_ids for i, p in enumerate(all_params) if p.logprob_token_ids} or None,
    )


def by_hand(logits, p, output):
    """Return one row's logits after allowed ids, bad words, min_tokens, logit_bias and penalties, in that order."""
    logits = logits.clone()
    if p.allowed_token_ids:
        forbidden = torch.ones(V, dtype=torch.bool)
        forbidden[p.allowed_token_ids] = False
        logits[forbidden] = -math.inf
    for word in p.bad_words_token_ids or ():
        if len(word) == 1 or output[-(len(word) - 1) :] == word[:-1]:
            logits[word[-1]] = -math.inf
    if len(output) < p.min_tokens:
        logits[list(p.all_stop_token_ids)] = -math.inf
    for token, bias in (p.logit_bias or {}).items():
        logits[token] += bias
    for token in {*PROMPT, *output}:
        logits[token] = (
            logits[token] / p.repetition_penalty if logits[token] > 0 else logits[token] * p.repetition_penalty
        )
    for token in set(output):
        logits[token] -= p.frequency_penalty * output.count(token) + p.presence_penalty
    return logits


def bad_words(*words):
    made = params()
    made._bad_words_token_ids = [list(word) for word in words]
    return made


CASES = {  # made when they are used: vLLM takes seconds to import
    "plain": partial(params),
    "repetition_penalty": partial(params, repetition_penalty=1.7),
    "presence_penalty": partial(params, presence_penalty=1.5),
    "frequency_penalty": partial(params, frequency_penalty=0.9),
    "logit_bias": partial(params, logit_bias={7: 5.0, 11: -2.0}),
    "allowed_token_ids": partial(params, allowed_token_ids=[2, 7, 8, 20]),
    "min_tokens": partial(params, min_tokens=len(OUTPUT) + 2, stop_token_ids=[6, 30]),
    "bad_words": partial(bad_words, [12], [5, 7], [7, 8], [5, 7, 13]),
    "all": partial(
        params,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.4,
        logit_bias={7: 3.0, 8: -3.0},
        allowed_token_ids=list(range(1, 30)),
        min_tokens=len(OUTPUT) + 1,
        stop_token_ids=[6],
    ),
}


def wanted_rows(logits, requests):
    rows = []
    for request in requests:
        for count in range(len(request.drafts) + 1):
            rows.append(by_hand(logits[len(rows)], request.params, [*OUTPUT, *request.drafts[:count]]))
    return torch.stack(rows)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("drafts", [[], DRAFTS], ids=["plain", "drafted"])
def test_every_row_is_processed_like_a_request_of_its_own(sampler, name, drafts):
    requests = requests_of(CASES["plain"](), CASES[name](), drafts=drafts)
    logits = torch.randn(2 * (len(drafts) + 1), V, generator=torch.Generator().manual_seed(1)) * 3
    wanted = wanted_rows(logits, requests)
    all_drafts = [part.drafts for part in requests]
    processed = sampler._process(logits.clone(), [part.request for part in requests], all_drafts, metadata_of(requests))
    torch.testing.assert_close(processed, wanted)
    changed = (wanted != logits).any(-1)
    assert not changed[: len(drafts) + 1].any(), "the request beside it is left alone"
    assert changed[len(drafts) + 1 :].any() == (name != "plain"), "a case that changes nothing tests nothing"


def test_nothing_is_left_of_the_rows_of_a_step_before(sampler):
    for names, drafts in [
        (["min_tokens", "logit_bias", "all"], DRAFTS),
        (["allowed_token_ids"], []),
        (["logit_bias", "plain", "min_tokens", "bad_words"], DRAFTS[:2]),
        (["repetition_penalty", "plain", "all", "plain"], DRAFTS),
    ]:
        parts = requests_of(*[CASES[name]() for name in names], drafts=drafts)
        logits = torch.randn(len(parts) * (len(drafts) + 1), V, generator=torch.Generator().manual_seed(5)) * 3
        wanted = wanted_rows(logits, parts)
        all_drafts = [part.drafts for part in parts]
        processed = sampler._process(logits.clone(), [part.request for part in parts], all_drafts, metadata_of(parts))
        torch.testing.assert_close(processed, wanted)


@pytest.mark.parametrize("name", CASES)
def test_the_tokens_chosen_are_those_of_rows_without_drafts(sampler, name):
    """Greedy with drafts that are all right commits what one step after the other would have."""
    logits = torch.randn(K + 1, V, generator=torch.Generator().manual_seed(2)) * 3
    p, output, wanted = CASES[name](), list(OUTPUT), []
    for row in logits:
        wanted.append(int(by_hand(row, p, output).argmax()))
        output.append(wanted[-1])
    requests = requests_of(p, drafts=wanted[:K])
    result, status = choose(sampler, logits.clone(), requests, width=K + 2)
    assert result.sampled_token_ids.tolist() == [[*wanted, -1]]
    assert status.tolist() == [Status.OK]


@pytest.mark.exhaustive  # vLLM compiles what ranks tokens: half a minute
@pytest.mark.timeout(300)
def test_logprobs_are_of_the_raw_logits_and_of_the_tokens_committed(sampler):
    requests = requests_of(params(logprobs=2, logit_bias={7: 50.0}), params())
    logits = torch.randn(2 * (K + 1), V, generator=torch.Generator().manual_seed(3))
    result, _ = choose(sampler, logits.clone(), requests)
    committed = result.sampled_token_ids[0]
    assert committed[0] == 7, "the bias decides"
    raw = logits.log_softmax(-1)
    tensors = result.logprobs_tensors
    assert tensors.logprobs.shape == (2 * (K + 1), 3)
    for place, token in enumerate(committed.tolist()):
        if token >= 0:
            assert tensors.logprob_token_ids[place, 0] == token
            assert tensors.logprobs[place, 0] == pytest.approx(float(raw[place, token]), abs=1e-5)
            assert tensors.logprobs[place, 1] == pytest.approx(float(raw[place].max()), abs=1e-5)
    second_row = tensors.logprob_token_ids[K + 1, 0]
    assert second_row == result.sampled_token_ids[1, 0], "the second request's rows start where its columns do"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_request_without_a_next_token_commits_nothing_and_the_others_go_on(sampler, bad):
    requests = requests_of(params(), params(), drafts=[])
    logits = torch.randn(2, V)
    logits[0] = bad
    result, status = choose(sampler, logits, requests)
    assert result.sampled_token_ids[0].tolist() == [-1, -1]
    assert status.tolist() == [Status.BAD_LOGITS, Status.OK]
    assert result.sampled_token_ids[1].tolist() == [int(logits[1].argmax()), -1]


def test_drafts_that_are_not_the_proposal_leave_a_plain_round(sampler):
    p = params(temperature=1.0, seed=3, extra_args={"outrider": {"verification": "rejection"}})
    logits = torch.randn(K + 1, V)
    plain = requests_of(p, drafts=[])
    alone, _ = choose(sampler, logits[:1].clone(), plain, width=K + 1)
    dropped = requests_of(p, drafts=[PLACEHOLDER_TOKEN_ID] * K)
    result, status = choose(sampler, logits.clone(), dropped)
    assert result.sampled_token_ids.tolist() == alone.sampled_token_ids.tolist()
    assert status.tolist() == [Status.BAD_PROPOSAL]


def test_q_of_a_cut_proposal_is_cut_with_it(sampler):
    """A request with q beside one without: each is verified against its own."""
    ids = np.array([[7, 8], [8, 9], [9, 10]], dtype=np.int32)
    drawn = SparseQ(ids, np.array([[1, 0], [1, 0], [1, 0]], dtype=np.float32))
    p = params(temperature=1.0, seed=3, extra_args={"outrider": {"verification": "rejection"}})
    logits = torch.zeros(5, V)
    logits[range(5), [7, 8, 20, 9, 21]] = 100.0
    requests = [*requests_of(p, drafts=[7, 8], q=drawn), *requests_of(p, drafts=[9])]
    result, status = choose(sampler, logits, requests, width=4)
    assert result.sampled_token_ids.tolist() == [[7, 8, 20, -1], [9, 21, -1, -1]]
    assert status.tolist() == [Status.OK, Status.OK]
