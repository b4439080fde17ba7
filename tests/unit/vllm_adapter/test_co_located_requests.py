"""Requests that co-located drafting cannot honour are refused by field, at the door."""

from types import SimpleNamespace

import pytest

from outrider.actors.replica_calls import GenerationRequest, RequestError
from outrider.actors.serving.co_located import check_co_located, check_co_located_params


def request(**changes):
    return GenerationRequest("id", prompt_text="a", **changes)


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        (request(speculation=False), "speculation.enabled"),
        (request(num_speculative_tokens=2), "speculation.num_speculative_tokens"),
        (request(verification="coupled"), "speculation.verification"),
        (request(verification="rejection"), "speculation.verification"),
        (request(sampling={"seed": 0}), "sampling.seed"),
        (request(sampling={"seed": 3, "temperature": 0.5}), "sampling.seed"),
    ],
)
def test_what_vllm_would_ignore_is_refused(asked, field):
    with pytest.raises(RequestError) as caught:
        check_co_located(asked, "eagle3", on_gpu=False)
    assert caught.value.field == field
    assert "eagle3" in caught.value.problem


@pytest.mark.parametrize("asked", [request(), request(sampling={"temperature": 0.0, "seed": 3, "max_tokens": 4})])
def test_the_rest_passes(asked):
    check_co_located(asked, "eagle3", on_gpu=False)


def test_seeds_are_kept_on_gpus():
    check_co_located(request(sampling={"seed": 3}), "eagle3", on_gpu=True)


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"extra_args": {"outrider": {"num_speculative_tokens": 0}}}, "speculation.num_speculative_tokens"),
        ({"extra_args": {"outrider": {"verification": "block"}}}, "speculation.verification"),
        ({"seed": 1}, "sampling.seed"),
        ({"seed": 1, "temperature": 0.0}, None),
        ({"extra_args": {"outrider": {"timeout_s": 1.0}}}, None),
        ({}, None),
    ],
)
def test_the_same_holds_for_requests_with_vllms_own_parameters(params, field):
    given = SimpleNamespace(**{"extra_args": None, "seed": None, "temperature": 1.0, **params})
    if field is None:
        check_co_located_params(given, "mtp", on_gpu=False)
        return
    with pytest.raises(RequestError) as caught:
        check_co_located_params(given, "mtp", on_gpu=False)
    assert caught.value.field == field
