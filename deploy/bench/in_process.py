"""The other side of a benchmark, vLLM's own engine with nothing of Outrider in it:
``python -m outrider.deploy.bench.in_process``.

A process of its own, driven by JSON lines: the first one on stdin holds ``engine`` (vLLM's engine arguments) and is
answered with ``ready`` or ``error``; each later one is a turn, ``asks`` and ``concurrency``, answered with one ``done``
line per finished answer and a last one with ``seconds`` and ``answers``. The end of stdin ends it, at once, even in the
middle of a turn.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from collections import deque
from contextlib import aclosing, suppress
from dataclasses import asdict
from typing import Any, TextIO

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from outrider.actors.vllm_seam.engine_args import on_gpu
from outrider.actors.vllm_seam.engine_args_schema import checked
from outrider.cluster.device_defaults import CPU_KV_CACHE_BYTES
from outrider.deploy.bench.load import Answer, Ask


async def answer(engine: AsyncLLM, ask: Ask, name: str) -> Answer:
    """One request, streamed: a message a step, as a client of our server gets them."""
    params = SamplingParams(
        temperature=ask.temperature,
        max_tokens=ask.max_tokens,
        seed=ask.seed,
        ignore_eos=ask.ignore_eos,
        output_kind=RequestOutputKind.DELTA,
    )
    arrivals: list[tuple[float, int]] = []
    token_ids: list[int] = []
    counted: dict[str, Any] = {}
    sent = time.perf_counter()
    async with aclosing(engine.generate(ask.text, params, name)) as outputs:
        async for output in outputs:
            completion = output.outputs[0]
            if completion.token_ids:
                arrivals.append((time.perf_counter() - sent, len(completion.token_ids)))
                token_ids.extend(completion.token_ids)
            if completion.spec_decode_metrics is not None:
                counted = completion.spec_decode_metrics.to_dict()
    return Answer(
        ask.index,
        tuple(arrivals),
        time.perf_counter() - sent,
        tuple(token_ids),
        counted.get("num_spec_steps", 0),
        counted.get("num_draft_tokens", 0),
        counted.get("num_accepted_draft_tokens", 0),
    )


async def turn(engine: AsyncLLM, command: dict[str, Any], number: int, out: TextIO) -> dict[str, Any]:
    """A closed loop: as many requests under way as ``concurrency`` says, until the asks run out."""
    waiting = deque(Ask(**ask) for ask in command["asks"])
    answers: list[Answer] = []

    async def client() -> None:
        while waiting:
            ask = waiting.popleft()
            answers.append(await answer(engine, ask, f"{number}-{len(waiting)}"))
            say(out, {"done": len(answers), "tokens": sum(len(each.token_ids) for each in answers)})

    started = time.perf_counter()
    async with asyncio.TaskGroup() as clients:
        for _ in range(command["concurrency"]):
            clients.create_task(client())
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "answers": [asdict(each) for each in answers]}


def engine_arguments(given: dict[str, Any]) -> dict[str, Any]:
    """What depends on the platform, decided as for our own engines."""
    gpu = on_gpu()
    arguments = {key: value for key, value in given.items() if value is not None}
    arguments.setdefault("enforce_eager", not gpu)
    if not gpu:
        models = 2 if "speculative_config" in given else 1
        arguments.setdefault("kv_cache_memory_bytes", models * CPU_KV_CACHE_BYTES)
    return arguments


async def serve(out: TextIO) -> None:
    loop, commands = asyncio.get_running_loop(), asyncio.Queue[dict[str, Any]]()
    main_task = asyncio.current_task()
    assert main_task is not None

    def read() -> None:
        with suppress(RuntimeError):  # the loop has ended by itself
            for line in sys.stdin:
                loop.call_soon_threadsafe(commands.put_nowait, json.loads(line))
            loop.call_soon_threadsafe(main_task.cancel)

    threading.Thread(target=read, daemon=True).start()
    engine: AsyncLLM | None = None
    try:
        arguments = engine_arguments((await commands.get())["engine"])
        others = checked("target", arguments.get("engine_args", {}))
        common = {name: value for name, value in arguments.items() if name != "engine_args"}
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**common, **others))
        say(out, {"ready": arguments})
        number = 0
        while True:
            number += 1
            say(out, await turn(engine, await commands.get(), number, out))
    finally:
        if engine is not None:
            engine.shutdown()


def say(out: TextIO, message: dict[str, Any]) -> None:
    print(json.dumps(message), file=out, flush=True)


def main() -> int:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is not for whoever reads our lines
    try:
        asyncio.run(serve(out))
    except asyncio.CancelledError:
        return 0
    except Exception as error:
        inner = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
        say(out, {"error": f"{type(inner).__name__}: {inner}"})
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
