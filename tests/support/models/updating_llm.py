"""Updates the weights of an ``outrider.AsyncLLM`` under load, in a process of its own.

    python -m tests.support.models.updating_llm < job.json

The last line of stdout is JSON: each request's prompt, tokens, finish reason, number of outputs, and how many updates
had ended when it began and had begun when it ended.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

CLIENTS = 4
REQUESTS_BETWEEN_UPDATES = 2


def run_updates(job: Mapping[str, Any], timeout_s: float = 600) -> list[dict[str, Any]]:
    """Returns all requests of a run. job: ``arguments`` of AsyncLLM, ``checkpoints`` in order, ``max_tokens``."""
    command = [sys.executable, "-m", "tests.support.models.updating_llm"]
    done = subprocess.run(command, input=json.dumps(job), capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stderr[-6000:]
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


async def _run(job: Mapping[str, Any]) -> list[dict[str, Any]]:
    from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest

    from outrider import AsyncLLM, SamplingParams

    llm = AsyncLLM(**job["arguments"])
    params = SamplingParams(temperature=0.0, max_tokens=job["max_tokens"], ignore_eos=True, detokenize=False)
    found: list[dict[str, Any]] = []
    begun = ended = 0
    stopping = False
    one_ended = asyncio.Event()

    async def client(number: int) -> None:
        turn = 0
        while not stopping:
            turn += 1
            prompt, first = list(b"%d %d one two one two" % (number, turn)), ended
            stream = llm.generate({"prompt_token_ids": prompt}, params, f"{number}-{turn}")
            outputs = [output.outputs[0] async for output in stream]
            answer = {"tokens": list(outputs[-1].token_ids), "reason": outputs[-1].finish_reason}
            found.append({"prompt": prompt, **answer, "outputs": len(outputs), "first": first, "last": begun})
            one_ended.set()

    async def some_have_ended() -> None:
        before = len(found)
        while len(found) < before + REQUESTS_BETWEEN_UPDATES:
            one_ended.clear()
            await one_ended.wait()

    try:
        await llm.init_weight_transfer_engine(WeightTransferInitRequest({}))
        clients = [asyncio.create_task(client(number)) for number in range(CLIENTS)]
        for number, checkpoint in enumerate(job["checkpoints"]):
            await some_have_ended()
            begun += 1
            if asleep := number % 5 == 4:
                await llm.sleep(level=0, mode="keep")
            await llm.start_weight_update()
            await llm.update_weights(WeightTransferUpdateRequest({"path": checkpoint}))
            await llm.finish_weight_update()
            if asleep:
                assert await llm.is_sleeping(), "an update does not wake it"
                await llm.wake_up()
            ended += 1
        await some_have_ended()
        stopping = True
        await asyncio.gather(*clients)
    finally:
        llm.shutdown()
    return found


if __name__ == "__main__":
    print(json.dumps(asyncio.run(_run(json.loads(sys.stdin.read())))))
