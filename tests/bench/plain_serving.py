"""Compares `outrider serve` without a drafter with `vllm serve`, asked the same over OpenAI's API in turns.

    python -m tests.bench.plain_serving --profile 32b-0.6b --dilation 4 --concurrency 1,8,32 --pairs 8

The target is emulated (docs/performance.md), so that what is left is serving: a step takes a data centre's time, and
whoever has the next one late has work of its own on its path. Both schedule asynchronously. Answers are streamed; a
turn's speed is the sum of its streams' own, each from its first chunk to its last.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import time
from pathlib import Path
from typing import Any

import aiohttp

from outrider.deploy.bench.machine import machine, versions
from outrider.deploy.ports import pick_free_port
from tests.bench.emulated_speed import numbers, working_directory
from tests.bench.emulation import served
from tests.bench.emulation.load import prompt
from tests.bench.emulation.pair import write_pair
from tests.bench.emulation.paired import in_turns, ratio_of_pairs
from tests.bench.emulation.profiles import PROFILES, TEXTS
from tests.bench.emulation.vllm_server import vllm_serving


async def _stream(session: aiohttp.ClientSession, port: int, index: int, max_tokens: int) -> float:
    """Stream one answer. Returns tokens a second after the first; raises RuntimeError where a token is missing."""
    body = {
        "model": "target", "prompt": prompt(index), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    first = last = tokens = 0.0
    async with session.post(f"http://127.0.0.1:{port}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line.removeprefix(b"data: "))
            if chunk["choices"]:
                last = time.perf_counter()
                first = first or last
            tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
    if tokens != max_tokens:
        raise RuntimeError(f"port {port}: {tokens} of {max_tokens} tokens came")
    return (max_tokens - 1) / (last - first)


async def _turn(port: int, first_index: int, concurrency: int, max_tokens: int) -> float:
    """Return the tokens a second of so many streams at once."""
    unlimited = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=unlimited, timeout=aiohttp.ClientTimeout(total=None)) as session:
        asked = [_stream(session, port, first_index + index, max_tokens) for index in range(concurrency)]
        return sum(await asyncio.gather(*asked))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", choices=PROFILES, default="32b-0.6b")
    parser.add_argument("--dilation", type=float, default=4.0)
    parser.add_argument("--concurrency", type=numbers, default=[1, 8])
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--out", type=Path, help="every turn as JSON")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    args = parser.parse_args()
    print(f"{args.profile}, dilation {args.dilation:g}, {machine(())}, {versions()}", flush=True)
    ports = {"outrider": pick_free_port(), "vllm": pick_free_port()}
    speeds: dict[int, dict[str, list[float]]] = {}
    with working_directory(None) as directory:
        pair = write_pair(directory, PROFILES[args.profile].times(args.dilation), TEXTS["stated"])
        most = max(args.concurrency)
        config: dict[str, Any] = served.configuration(pair, 1, most, {"serving": {"http_port": ports["outrider"]}})
        del config["drafter"], config["speculation"]
        with (
            served.serving(config, directory),
            vllm_serving(pair.target, ports["vllm"], most, directory),
        ):
            for port in ports.values():
                asyncio.run(_turn(port, 900_000, most, 16))
            for place, concurrency in enumerate(args.concurrency):

                def turn(name: str, number: int, place: int = place, concurrency: int = concurrency) -> float:
                    first = (place * args.pairs + number) * most
                    return asyncio.run(_turn(ports[name], first, concurrency, args.tokens)) * args.dilation

                found = speeds[concurrency] = in_turns(list(ports), args.pairs, turn)
                means = ", ".join(f"{name} {sum(of) / len(of):.1f}" for name, of in found.items())
                ratio = ratio_of_pairs(found["outrider"], found["vllm"])
                print(f"concurrency {concurrency}, {args.pairs} pairs: {means} tok/s; ratio {ratio}", flush=True)
    if args.out:
        args.out.write_text(json.dumps({"settings": {k: str(v) for k, v in vars(args).items()}, "speeds": speeds}))


if __name__ == "__main__":
    main()
