"""Co-located drafting is served by the same APIs, is named in the status, and refuses what vLLM cannot do."""

import grpc
import pytest

from outrider.deploy.client.sync_client import OutriderError

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

TEXT = b"It was the best of times, it was the worst of times. "


def test_status_names_the_method_and_there_is_no_drafter_actor(co_located):
    status = co_located.status()
    assert list(status.methods) == ["draft_model"]
    assert status.speculation_up
    assert status.num_speculative_tokens == 4
    assert not status.HasField("drafter")
    assert "Drafter" not in co_located.actors()
    assert {"Target", "Verifier"} <= set(co_located.actors()), "the rank keeps its name"


@pytest.mark.parametrize(
    ("options", "field"), [({"speculation": False}, "speculation.enabled"), ({"logit_bias": {65: 1.0}}, "sampling")]
)
def test_what_vllms_own_drafting_cannot_do_is_refused_by_name(co_located, options, field):
    """By us, and by vLLM. The table is in unit/vllm_adapter/test_co_located_requests.py."""
    with pytest.raises(OutriderError) as caught:
        co_located.client.generate(list(TEXT), max_tokens=4, **options)
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert field in str(caught.value)
