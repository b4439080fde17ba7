"""Served tokens are those of another implementation, and of plain vLLM on the same GPU, whoever drafts."""

import pytest

pytest.importorskip("ray")
pytest.importorskip("grpc")

from tests.gpu.engines.deployments import target_and_lookup
from tests.integration.test_equality import (
    check_against,
    plain,
    test_in_a_batch_of_sixteen_with_others_coming_and_going,
    test_with_a_draft_model,
)

__all__ = ["plain", "test_in_a_batch_of_sixteen_with_others_coming_and_going", "test_with_a_draft_model"]

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800), pytest.mark.gpus(2)]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("pair", marks=pytest.mark.gpus(2)),
        pytest.param("drafter_tp2", marks=pytest.mark.gpus(3)),
        pytest.param("target_tp2", marks=pytest.mark.gpus(3)),
        pytest.param("both_tp2", marks=pytest.mark.gpus(4)),
    ],
)
def test_against_plain_vllm(plain, deployments, name):
    check_against(deployments.use(name), plain)


@pytest.mark.gpus(1)
@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_a_target_on_the_only_gpu_with_a_look_up(plain, added, models, method):
    check_against(added(f"{method} on one GPU", **target_and_lookup(models, method)), plain)
