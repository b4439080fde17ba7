"""What one client that asks for JSON costs those beside it.

    python -m tests.bench.json_cost --profile 70b-8b --dilation 4 --streams 1,7 --pairs 8

Streams without constraints are asked beside one more of their own kind and beside one whose answer follows a schema, in
turns; a turn's speed is the sum of theirs, without the one beside them. Both models are emulated (docs/emulation.md);
the schema's masks, and the rounds whose choice waits for them, are real.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
from pathlib import Path
from typing import Any

from outrider.deploy.bench.machine import machine, versions
from outrider.deploy.ports import pick_free_port
from tests.bench.emulated_speed import numbers, working_directory
from tests.bench.emulation import served
from tests.bench.emulation.pair import write_pair
from tests.bench.emulation.paired import ratio_of_pairs
from tests.bench.emulation.profiles import PROFILES, TEXTS
from tests.bench.plain_serving import client, stream

SCHEMA = {"type": "array", "items": {"type": "integer"}, "minItems": 2000}
"""No answer comes to its end: it is as long as it was asked for."""

BESIDE: dict[str, dict[str, Any]] = {
    "plain": {},
    "json": {"response_format": {"type": "json_schema", "json_schema": {"name": "numbers", "schema": SCHEMA}}},
}


async def _turn(
    port: int, first_index: int, streams: int, max_tokens: int, beside: dict[str, Any]
) -> tuple[float, float]:
    """Tokens a second of the streams, and of the one beside them, which outlasts them."""
    async with client() as session:
        other = asyncio.create_task(stream(session, port, first_index, 2 * max_tokens, beside))
        asked = [stream(session, port, first_index + 1 + index, max_tokens) for index in range(streams)]
        return sum(await asyncio.gather(*asked)), await other


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", choices=PROFILES, default="70b-8b")
    parser.add_argument("--dilation", type=float, default=4.0)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--streams", type=numbers, default=[1, 7])
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--out", type=Path, help="every turn as JSON")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    port = pick_free_port()
    speeds: dict[int, dict[str, list[tuple[float, float]]]] = {}
    print(f"{args.profile}, dilation {args.dilation:g}, {machine(())}, {versions()}", flush=True)
    with working_directory(None) as directory:
        pair = write_pair(directory, PROFILES[args.profile].times(args.dilation), TEXTS["stated"])
        most = max(args.streams) + 1
        config = served.configuration(pair, args.k, most, {"serving": {"http_port": port}})
        with served.serving(config, directory) as served_client:
            served.wait_until_drafting(served_client, most)
            index = 0
            for streams in args.streams:
                found: dict[str, list[tuple[float, float]]] = {name: [] for name in BESIDE}
                for number in range(args.pairs):
                    for name in list(BESIDE)[:: 1 if number % 2 == 0 else -1]:
                        turn = asyncio.run(_turn(port, index, streams, args.tokens, BESIDE[name]))
                        found[name].append((turn[0] * args.dilation, turn[1] * args.dilation))
                    index += most
                speeds[streams] = found
                ratio = ratio_of_pairs(*([each for each, _ in found[name]] for name in ("json", "plain")))
                mean = {name: [sum(side) / len(side) for side in zip(*of, strict=True)] for name, of in found.items()}
                means = ", ".join(f"beside {name} {of[0]:.1f} (itself {of[1]:.1f})" for name, of in mean.items())
                print(f"{streams} streams, {args.pairs} pairs: {means} tok/s; ratio {ratio}", flush=True)
    if args.out:
        args.out.write_text(json.dumps({"settings": {k: str(v) for k, v in vars(args).items()}, "speeds": speeds}))


if __name__ == "__main__":
    main()
