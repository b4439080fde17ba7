"""Streams over OpenAI's API at servers whose models are emulated, asked in turns: what such benches have in common."""

from __future__ import annotations

import argparse
import json
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from outrider.deploy.bench.machine import machine, versions
from tests.bench.emulated_speed import numbers
from tests.bench.emulation.load import prompt
from tests.bench.emulation.profiles import PROFILES


def arguments(description: str | None, counts: str, most: int, profile: str) -> argparse.ArgumentParser:
    """counts: the option that says how many streams at once there are; most: of them by default, 1 being first."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", choices=PROFILES, default=profile)
    parser.add_argument("--dilation", type=float, default=4.0)
    parser.add_argument(counts, type=numbers, default=[1, most])
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--out", type=Path, help="every turn as JSON")
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Says what is measured where, and ends what was started where the program is ended."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    args = parser.parse_args()
    print(f"{args.profile}, dilation {args.dilation:g}, {machine(())}, {versions()}", flush=True)
    return args


def write(args: argparse.Namespace, speeds: Mapping[int, Mapping[str, Sequence[Any]]]) -> None:
    """By how many streams there were, and by what was asked in turns."""
    if args.out:
        args.out.write_text(json.dumps({"settings": {k: str(v) for k, v in vars(args).items()}, "speeds": speeds}))


async def stream(
    session: aiohttp.ClientSession, port: int, index: int, max_tokens: int, further: Mapping[str, Any] | None = None
) -> float:
    """Tokens a second after the first. further: keys of the request. Raises RuntimeError where a token is missing."""
    body = {
        "model": "target", "prompt": prompt(index), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True}, **(further or {}),
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


def client() -> aiohttp.ClientSession:
    """Without limits of its own."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None))
