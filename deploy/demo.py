"""Implements ``make demo``: serves a small model and compares one answer with and without speculation."""

from __future__ import annotations

import signal
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.cluster.config import ConfigError
from outrider.deploy.bench.servers import ServerProcess
from outrider.deploy.cli.arguments import exit_status
from outrider.deploy.client.sync_client import OutriderClient
from outrider.deploy.progress import Progress

PRESET = "smollm2"
DTYPE = "float32"
"""With float32, steps of one and of several tokens round alike, so that both ways give the same tokens."""

PROMPT = """Shorten this text a little:

The old lighthouse stands on a rock two miles from the harbour. Every evening the keeper climbs the stairs, cleans the \
glass, and lights the lamp. In summer he grows tomatoes in wooden boxes and sells them to the fishermen. In winter the \
sea is too rough for boats, and nobody comes for weeks. He reads by the stove, feeds his two cats, and writes down the \
weather in a big green book. When spring comes, the first boat brings him letters, coffee and a new lamp."""
"""The answer repeats much of this prompt."""

MAX_TOKENS = 160
PAIRS = 3


@dataclass(frozen=True)
class Answer:
    """Holds the result of one request."""

    token_ids: tuple[int, ...]
    tokens_per_s: float
    """Rate from the first message to the last, without the tokens of the first."""

    rounds: int


def main() -> int:
    progress = Progress()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    server = ServerProcess(PRESET, "--dtype", DTYPE)

    def work() -> None:
        progress.say(f"starting: outrider serve {PRESET} --dtype {DTYPE}")
        try:
            with OutriderClient(server.start(lambda: None)) as client:
                show(client, progress)
        finally:
            progress.say("shutting down")
            server.stop()
        print(f"Next: outrider serve {PRESET}, then http://127.0.0.1:8000/ in a browser", flush=True)

    return exit_status("demo", work, verbose=False)


def show(client: OutriderClient, progress: Progress) -> None:
    """Streams one answer, then repeats the same request with and without speculation, in turns."""
    print(f"\n{PROMPT}\n")
    first = _ask(client, True, shown=True), _ask(client, False)  # each kind of step is warm after them
    print("\n")
    drafted, plain = [], []
    for pair in range(1, PAIRS + 1):
        progress.say(f"the same again, with speculation and without: {pair} of {PAIRS}")
        drafted.append(_ask(client, True))
        plain.append(_ask(client, False))
    same = {answer.token_ids for answer in (*first, *drafted, *plain)}
    print(f"\n{comparison(drafted, plain)}")
    print("the tokens are the same each time\n" if len(same) == 1 else f"{len(same)} DIFFERENT answers\n", flush=True)


def _ask(client: OutriderClient, speculation: bool, shown: bool = False) -> Answer:
    ids: list[int] = []
    began, at_first, rounds = 0.0, 0, 0
    messages = [{"role": "user", "content": PROMPT}]
    drafts = None if speculation else False  # None is the server's default
    with client.stream(messages, temperature=0.0, max_tokens=MAX_TOKENS, speculation=drafts) as stream:
        for message in stream:
            ids += message.token_ids
            rounds += message.num_rounds
            if not began and ids:
                began, at_first = time.monotonic(), len(ids)
            if shown:
                print(message.text_delta, end="", flush=True)
    if not ids:
        raise ConfigError("the answer was empty")
    return Answer(tuple(ids), (len(ids) - at_first) / max(time.monotonic() - began, 1e-9), rounds)


def comparison(drafted: Sequence[Answer], plain: Sequence[Answer]) -> str:
    """Returns the median speeds of both ways, their ratio, and the tokens of a round."""
    lines, speeds = [], []
    for name, side in (("with speculation", drafted), ("without", plain)):
        speeds.append(statistics.median(answer.tokens_per_s for answer in side))
        per_round = sum(len(answer.token_ids) for answer in side) / sum(answer.rounds for answer in side)
        lines.append(f"{name:<16}  {speeds[-1]:6.1f} tokens/s  {per_round:5.2f} tokens a round")
    return "\n".join([*lines, f"{speeds[0] / speeds[1]:.2f} times as fast (medians of {len(drafted)}, in turns)"])


if __name__ == "__main__":
    sys.exit(main())
