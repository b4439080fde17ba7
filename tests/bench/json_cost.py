"""What one client that asks for JSON costs those beside it.

    python -m tests.bench.json_cost --profile 70b-8b --dilation 4 --streams 1,7 --pairs 8

Streams without constraints are asked beside one more of their own kind and beside one whose answer follows a schema, in
turns; a turn's speed is the sum of theirs, without the one beside them. Both models are emulated (docs/performance.md);
the schema's masks, and the rounds whose choice waits for them, are real.
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
    parser = arguments(__doc__, "--streams", 7, "70b-8b")
    parser.add_argument("--k", type=int, default=4)
    args = parsed(parser)
    port = pick_free_port()
    speeds: dict[int, dict[str, list[tuple[float, float]]]] = {}
    with working_directory(None) as directory:
        pair = write_pair(directory, PROFILES[args.profile].times(args.dilation), TEXTS["stated"])
        most = max(args.streams) + 1
        config = served.configuration(pair, args.k, most, {"serving": {"http_port": port}})
        with served.serving(config, directory) as served_client:
            served.wait_until_drafting(served_client, most)
            for place, streams in enumerate(args.streams):

                def turn(name: str, number: int, place: int = place, streams: int = streams) -> tuple[float, float]:
                    first = (place * args.pairs + number) * most
                    theirs, its_own = asyncio.run(_turn(port, first, streams, args.tokens, BESIDE[name]))
                    return theirs * args.dilation, its_own * args.dilation

                found = speeds[streams] = in_turns(list(BESIDE), args.pairs, turn)
                ratio = ratio_of_pairs(*([each for each, _ in found[name]] for name in ("json", "plain")))
                mean = {name: [sum(side) / len(side) for side in zip(*of, strict=True)] for name, of in found.items()}
                means = ", ".join(f"beside {name} {of[0]:.1f} (itself {of[1]:.1f})" for name, of in mean.items())
                print(f"{streams} streams, {args.pairs} pairs: {means} tok/s; ratio {ratio}", flush=True)
    write(args, speeds)


if __name__ == "__main__":
    main()
