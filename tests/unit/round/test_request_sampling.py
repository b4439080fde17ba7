"""Tests how a request's parameters decide how its tokens are verified and its drafts drawn."""

import math
from dataclasses import replace

import numpy as np
import pytest

from outrider.actors.round.request import Request, as_drafted, check_for_ranks, random_seed, sampling_of
from outrider.cluster.link.messages import MAX_BIASED_TOKENS, DraftSampling, MessageError
from outrider.cluster.modes import BY_NAME, Mode, mode_for
from tests.unit.round.scripted_link import DEPLOYMENT, asked, params


@pytest.mark.parametrize("deployment", BY_NAME)
def test_a_plain_sampled_request_is_verified_as_deployed(deployment):
    assert sampling_of(params(), deployment).mode is BY_NAME[deployment]


def test_temperature_zero_is_greedy_whatever_else_is_asked():
    sampling = sampling_of(
        params(temperature=0.0, seed=3, top_p=0.5, extra_args=asked(verification="block")), "rejection"
    )
    assert sampling == DraftSampling(Mode.GREEDY, seed=3, top_n=0)


def test_a_seed_couples_unless_the_request_asks_for_something_else():
    assert sampling_of(params(seed=7), "rejection").mode is Mode.COUPLED
    assert sampling_of(params(seed=7, extra_args=asked(verification="block")), "rejection").mode is Mode.BLOCK


@pytest.mark.parametrize("deployment", BY_NAME)
def test_a_grammar_couples_because_the_scheduler_cuts_drafts_by_the_token(deployment):
    assert sampling_of(params(structured_outputs=object()), deployment).mode is Mode.COUPLED


@pytest.mark.parametrize("top_k", [2**31, 2**63 - 1, 10**300])
def test_a_top_k_that_no_vocabulary_reaches_is_told_as_the_largest_there_is(top_k):
    """An exception on rank 0 would end the engine, and the next one to which the request is sent again."""
    sampling = sampling_of(params(top_k=top_k), "rejection")
    assert as_drafted(sampling, params(top_k=top_k), 64, 1000).top_k == sampling.top_k == 2**31 - 1
    check_for_ranks(params(top_k=top_k))


def test_the_door_refuses_what_no_frame_could_carry():
    with pytest.raises(MessageError, match=r"Open\.biases"):
        check_for_ranks(params(logit_bias={1: 1e300}))


@pytest.mark.parametrize("choice", ["rejection", "block"])
def test_a_grammar_with_rejection_is_refused(choice):
    with pytest.raises(ValueError, match="not exact under a grammar"):
        mode_for(greedy=False, seeded=True, structured=True, asked=choice, deployment="rejection")


def test_requests_without_a_seed_get_one_each():
    seeds = {sampling_of(params(), "rejection").seed for _ in range(100)}
    assert len(seeds) == 100
    assert all(0 <= random_seed() < 2**63 for _ in range(100))


@pytest.mark.parametrize(("seed", "kept"), [(5, 5), (-5, -5), (2**63 - 1, 2**63 - 1), (2**63, -(2**63))])
def test_seeds_stay_within_64_bits(seed, kept):
    assert sampling_of(params(seed=seed), "rejection").seed == kept


def test_the_drafter_is_told_the_request_s_own_constraints_and_seed():
    given = params(temperature=0.7, top_p=0.9, top_k=-1, min_p=0.1, seed=4, extra_args=asked(verification="rejection"))
    drafting = as_drafted(sampling_of(given, "coupled"), given, 16, 2000)
    assert (drafting.mode, drafting.temperature, drafting.top_p, drafting.min_p) == (Mode.REJECTION, 0.7, 0.9, 0.1)
    assert (drafting.top_k, drafting.seed, drafting.top_n) == (0, 4, 16)
    assert (drafting.biases, drafting.only_biased) == ((), False)


def drafting(**changes):
    given = params(**changes)
    return as_drafted(sampling_of(given, "rejection"), given, 64, 2000)


def test_bias_and_single_token_bad_words_reach_the_drafter():
    told = drafting(logit_bias={5: 2.0, 6: -3.0}, bad_words_token_ids=[[6], [7], [8, 9]])
    assert dict(told.biases) == {5: 2.0, 6: -math.inf, 7: -math.inf}
    assert not told.only_biased


def test_allowed_tokens_reach_the_drafter_with_their_biases():
    told = drafting(allowed_token_ids=[1, 2, 3], logit_bias={2: 1.5, 9: 5.0}, bad_words_token_ids=[[3], [4]])
    assert told.only_biased
    assert dict(told.biases) == {1: 0.0, 2: 1.5, 3: -math.inf}


def test_too_long_a_list_of_allowed_tokens_stays_here():
    told = drafting(allowed_token_ids=list(range(MAX_BIASED_TOKENS + 1)), logit_bias={2: 1.5})
    assert (dict(told.biases), told.only_biased) == ({2: 1.5}, False)
    told = drafting(logit_bias=dict.fromkeys(range(MAX_BIASED_TOKENS + 9), 1.0))
    assert len(told.biases) == MAX_BIASED_TOKENS


def test_a_request_that_forbids_every_token_is_left_to_the_verifier():
    told = drafting(allowed_token_ids=[3], bad_words_token_ids=[[3]])
    assert (told.biases, told.only_biased) == ((), False)


def test_bad_words_that_the_model_has_no_logits_for_stay_here():
    assert dict(drafting(bad_words_token_ids=[[1999], [2000]]).biases) == {1999: -math.inf}


def test_a_top_p_too_small_for_float32_stays_above_zero():
    """The kernels refuse a top_p of 0, and an exception there would end the engine."""
    sampling = sampling_of(params(top_p=1e-300), "rejection")
    assert float(np.float32(sampling.top_p)) > 0


def made(**changes):
    return Request.of("a", params(**changes), [1, 2], DEPLOYMENT)


@pytest.mark.parametrize(("wanted", "most"), [(None, 4), (9, 4), (3, 3), (0, 0), (-1, 0)])
def test_a_request_has_fewer_drafts_than_the_deployment_or_as_many(wanted, most):
    assert made(extra_args=None if wanted is None else asked(num_speculative_tokens=wanted)).max_drafts == most


def test_a_request_that_forbids_its_own_verification_is_refused():
    with pytest.raises(ValueError, match="not exact under a grammar"):
        made(structured_outputs=object(), extra_args=asked(verification="rejection"))


def tenant(adapter, remembers_answers=True, **ours):
    deployment = replace(DEPLOYMENT, remembers_answers=remembers_answers)
    request = Request.of("a", params(extra_args=asked(**ours)), [1, 2], deployment, adapter)
    return request.sampling.tenant


def test_answers_of_an_adapter_are_remembered_for_the_same_tenant_s_with_it_alone():
    told = [tenant(adapter, tenant=whose) for whose in (0, 7) for adapter in ("", "one", "other")]
    assert len(set(told)) == 6
    assert told == [tenant(adapter, tenant=whose) for whose in (0, 7) for adapter in ("", "one", "other")]
    assert (told[0], told[3]) == (0, 7), "without one as ever"
    assert all(0 <= each < 2**63 for each in told)


def test_answers_about_pictures_are_remembered_apart():
    deployment = replace(DEPLOYMENT, remembers_answers=True)
    told = [
        Request.of(
            "a", params(extra_args=asked(tenant=whose)), [1, 2], deployment, adapter, shows_pictures=shown
        ).sampling.tenant
        for whose in (0, 7)
        for adapter in ("", "one")
        for shown in (False, True)
    ]
    assert len(set(told)) == 8
    assert (told[0], told[4]) == (0, 7)


def test_the_drafter_hears_of_adapters_that_it_has_itself():
    deployment = replace(DEPLOYMENT, draft_adapters={"one": 1, "two": 2})

    def told(adapter):
        return Request.of("a", params(), [1, 2], deployment, adapter).sampling.adapter

    assert [told(adapter) for adapter in ("one", "two", "three", "")] == [1, 2, 0, 0]
