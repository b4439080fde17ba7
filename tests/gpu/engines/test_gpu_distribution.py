"""Rejection and block verification as served on GPUs: tokens are distributed as the target's own."""

import pytest

pytest.importorskip("ray")
pytest.importorskip("grpc")

from tests.integration.test_served_distribution import (
    served,
    test_answers_are_distributed_as_the_target_s_own,
    test_the_test_tells_a_biased_sampler,
    test_with_a_target_that_is_padded_further_than_its_drafter,
)

__all__ = [
    "served",
    "test_answers_are_distributed_as_the_target_s_own",
    "test_the_test_tells_a_biased_sampler",
    "test_with_a_target_that_is_padded_further_than_its_drafter",
]

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800), pytest.mark.gpus(2)]
