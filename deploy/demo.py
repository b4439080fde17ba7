"""Implements ``make demo``: serves a small model and compares one answer with and without speculation."""

from __future__ import annotations

import signal
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

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
START_LIMIT_S = 300.0


class DemoError(ConfigError):
    """Says why the demo cannot go on."""


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
    limit = time.monotonic() + START_LIMIT_S

    def waiting() -> None:
        if time.monotonic() > limit:
            raise DemoError(f"the server was not ready after {START_LIMIT_S:.0f} s")

    def work() -> None:
        progress.say(f"starting: outrider serve {PRESET} --dtype {DTYPE}")
        try:
            with OutriderClient(server.start(waiting)) as client:
                show(client, progress)
        finally:
            progress.say("shutting down")
            server.stop()
        print(f"Next: outrider serve {PRESET}, then http://127.0.0.1:8000/ in a browser", flush=True)

    return exit_status("demo", work, verbose=False)


def show(client: OutriderClient, progress: Progress, out: TextIO | None = None) -> None:
    """Streams one answer, then compares the same request with and without speculation, in turns.

    Raises DemoError for an answer without tokens, and OutriderError.
    """
    out = out or sys.stdout
    print(f"\n{PROMPT}\n", file=out)
    first = _ask(client, True, out)  # also a warm-up, as is the next one for plain steps
    print("\n", file=out)
    _ask(client, False, max_tokens=16)
    drafted, plain = [], []
    for pair in range(1, PAIRS + 1):
        progress.say(f"the same again, with speculation and without: {pair} of {PAIRS}")
        drafted.append(_ask(client, True))
        plain.append(_ask(client, False))
    print(f"\n{comparison([first, *drafted], drafted, plain)}\n", file=out, flush=True)


def _ask(
    client: OutriderClient, speculation: bool, shown: TextIO | None = None, max_tokens: int = MAX_TOKENS
) -> Answer:
    ids: list[int] = []
    began, at_first, rounds = 0.0, 0, 0
    messages = [{"role": "user", "content": PROMPT}]
    # None is the server's default.
    drafts = None if speculation else False
    with client.stream(messages, temperature=0.0, max_tokens=max_tokens, speculation=drafts) as stream:
        for message in stream:
            ids += message.token_ids
            rounds += message.num_rounds
            if not began and ids:
                began, at_first = time.monotonic(), len(ids)
            if shown is not None:
                print(message.text_delta, end="", file=shown, flush=True)
    if not ids:
        raise DemoError("the answer was empty")
    return Answer(tuple(ids), (len(ids) - at_first) / max(time.monotonic() - began, 1e-9), rounds)


def comparison(all_drafted: Sequence[Answer], drafted: Sequence[Answer], plain: Sequence[Answer]) -> str:
    """Returns a table of the medians of both ways, and whether the tokens are equal."""
    fast, slow = (statistics.median(answer.tokens_per_s for answer in side) for side in (drafted, plain))
    per_round = [
        sum(len(answer.token_ids) for answer in side) / max(1, sum(answer.rounds for answer in side))
        for side in (drafted, plain)
    ]
    tokens = {answer.token_ids for answer in (*all_drafted, *plain)}
    same = "the same ones, each time" if len(tokens) == 1 else f"NOT the same: {len(tokens)} different answers"
    slower = ": drafting costs more here than it saves" if fast < slow else ""
    return "\n".join(
        [
            f"{'':<14}  speculation   without",
            f"{'tokens/s':<14}  {fast:>11.1f}  {slow:>8.1f}   {fast / slow:.2f} times as fast{slower}",
            f"{'tokens a round':<14}  {per_round[0]:>11.2f}  {per_round[1]:>8.2f}",
            f"{'tokens':<14}  {len(drafted[-1].token_ids):>11}  {len(plain[-1].token_ids):>8}   {same}",
            f"(medians of {len(drafted)} answers each, in turns)",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
