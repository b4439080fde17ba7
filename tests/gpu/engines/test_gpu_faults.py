"""A drafter that dies on its GPU, over ZeroMQ and over NCCL."""

import signal

import pytest

pytest.importorskip("ray")
pytest.importorskip("grpc")

from tests.faults.test_drafter import BACK_WITHIN_S, MAX_TOKENS, PROMPT
from tests.gpu.engines.deployments import pair_over
from tests.support.cluster.serving import drafted, num_accepted
from tests.support.load.traffic import Traffic

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800), pytest.mark.gpus(2)]


@pytest.mark.parametrize("backend", ["auto", "nccl"])
def test_a_drafter_is_killed_and_the_next_one_drafts(added, models, backend):
    """Traffic checks every answer; a posted NCCL receive must be aborted before the target can go on."""
    pair = added(f"pair over {backend}", **pair_over(models, backend))
    before = pair.linked()
    with Traffic(pair, PROMPT, MAX_TOKENS):
        killed = pair.signal_drafter(signal.SIGKILL)
        after = pair.linked(epoch_after=before.epoch, within_s=BACK_WITHIN_S)
    assert after.reconnects > before.reconnects
    assert pair.actors()["Drafter"].pid != killed
    answer = drafted(lambda: pair.client.generate(PROMPT, temperature=0.0, max_tokens=MAX_TOKENS), num_accepted)
    pair.reference.check(PROMPT, answer.token_ids, label=f"afterwards, over {backend}")
