"""Without a drafter: `outrider serve` and `vllm serve`, asked the same over OpenAI's API in turns.

    python -m tests.bench.plain_serving --profile 32b-0.6b --dilation 4 --concurrency 1,8,32 --pairs 8

The target is emulated (docs/performance.md), so that what is left is serving: a step takes a data centre's time, and
whoever has the next one late has work of its own on its path. Both schedule asynchronously. Answers are streamed; a
turn's speed is the sum of its streams' own, each from its first chunk to its last.
"""

from __future__ import annotations

import asyncio
from typing import Any

from outrider.deploy.ports import pick_free_port
from tests.bench.emulated_speed import working_directory
from tests.bench.emulation import served
from tests.bench.emulation.pair import write_pair
from tests.bench.emulation.paired import in_turns, ratio_of_pairs
from tests.bench.emulation.profiles import PROFILES, TEXTS
from tests.bench.emulation.streams import arguments, client, parsed, stream, write
from tests.bench.emulation.vllm_server import vllm_serving


async def _turn(port: int, first_index: int, concurrency: int, max_tokens: int) -> float:
    """Tokens a second of so many streams at once."""
    async with client() as session:
        asked = [stream(session, port, first_index + index, max_tokens) for index in range(concurrency)]
        return sum(await asyncio.gather(*asked))


def main() -> None:
    args = parsed(arguments(__doc__, "--concurrency", 8, "32b-0.6b"))
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
    write(args, speeds)


if __name__ == "__main__":
    main()
