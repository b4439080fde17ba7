"""``make demo``: fetches a small model, serves it, shows one answer with speculation and the same without."""

from __future__ import annotations

import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TextIO

from outrider.deploy.bench.machine import BenchError
from outrider.deploy.bench.servers import ServerProcess
from outrider.deploy.client.sync_client import OutriderClient, OutriderError
from outrider.deploy.progress import Progress
from outrider.v1 import generation_pb2 as pb

PRESET = "smollm2"
DTYPE = "float32"
"""Steps of one token and of several must not round differently: both ways to decode then give the same tokens."""

PROMPT = """Shorten this text a little:

The old lighthouse stands on a rock two miles from the harbour. Every evening the keeper climbs the stairs, cleans the \
glass, and lights the lamp. In summer he grows tomatoes in wooden boxes and sells them to the fishermen. In winter the \
sea is too rough for boats, and nobody comes for weeks. He reads by the stove, feeds his two cats, and writes down the \
weather in a big green book. When spring comes, the first boat brings him letters, coffee and a new lamp."""
"""An answer that repeats much of its prompt, which is what prompt lookup drafts well."""

MAX_TOKENS = 160
PAIRS = 3
START_LIMIT_S = 300.0

_ACCEPTED, _DIM, _PLAIN = "\033[32m", "\033[2m", "\033[0m"


class DemoError(Exception):
    """The demo cannot go on. The message says why."""


@dataclass(frozen=True)
class Answer:
    """What one request gave."""

    token_ids: tuple[int, ...]
    tokens_per_s: float
    """From the first message to the last, the first one's tokens left out."""

    rounds: int


def main() -> int:
    progress = Progress()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    server = ServerProcess(PRESET, "--dtype", DTYPE)
    limit = time.monotonic() + START_LIMIT_S

    def waiting() -> None:
        if time.monotonic() > limit:
            raise DemoError(f"the server was not ready after {START_LIMIT_S:.0f} s")

    code = 0
    try:
        progress.say(f"starting: outrider serve {PRESET} --dtype {DTYPE}")
        with OutriderClient(server.start(waiting)) as client:
            show(client, progress)
    except (DemoError, BenchError, OutriderError) as error:
        print(f"outrider: demo: {error}", file=sys.stderr)
        code = 1
    except KeyboardInterrupt:
        code = 130
    finally:
        progress.say("shutting down")
        server.stop()
    if code == 0:
        print(f"Next: outrider serve {PRESET}, then http://127.0.0.1:8000/ in a browser", flush=True)
    return code


def show(client: OutriderClient, progress: Progress, out: TextIO | None = None) -> None:
    """Prints one answer as it comes, then the same request with and without speculation, in turns, and what that gives.

    Raises DemoError for an answer without tokens, OutriderError."""
    out = out or sys.stdout
    colour = out.isatty() and "NO_COLOR" not in os.environ

    def write(text: str, style: str) -> None:
        print(f"{style}{text}{_PLAIN}" if colour and style else text, end="", file=out, flush=True)

    def write_message(message: pb.GenerateStreamResponse) -> None:
        texts = [client.detokenize([token_id]).text for token_id in message.token_ids] if colour else []
        if "".join(texts) != message.text_delta:  # a character may be spread over several tokens
            write(message.text_delta, "")
            return
        for text, origin in zip(texts, message.origins, strict=True):
            write(text, _ACCEPTED if origin == pb.TOKEN_ORIGIN_ACCEPTED else "")

    write(f"\n{PROMPT}\n\n", _DIM)
    first = _ask(client, True, write_message)  # warms up what is set up lazily, as the next does for plain steps
    write("\n\n", "")
    if colour:
        print(f"{_ACCEPTED}Green{_PLAIN}: drafted and accepted. The rest: the target's own.\n", file=out)
    _ask(client, False, max_tokens=16)
    drafted, plain = [], []
    for pair in range(1, PAIRS + 1):
        progress.say(f"the same again, with speculation and without: {pair} of {PAIRS}")
        drafted.append(_ask(client, True))
        plain.append(_ask(client, False))
    print(f"\n{comparison([first, *drafted], drafted, plain)}\n", file=out, flush=True)


def _ask(
    client: OutriderClient,
    speculation: bool,
    on_message: Callable[[pb.GenerateStreamResponse], None] | None = None,
    max_tokens: int = MAX_TOKENS,
) -> Answer:
    ids: list[int] = []
    began, at_first, rounds = 0.0, 0, 0
    messages = [{"role": "user", "content": PROMPT}]
    # None: as the server does by default.
    drafts = None if speculation else False
    with client.stream(messages, temperature=0.0, max_tokens=max_tokens, speculation=drafts) as stream:
        for message in stream:
            ids += message.token_ids
            rounds += message.num_rounds
            if not began and ids:
                began, at_first = time.monotonic(), len(ids)
            if on_message is not None:
                on_message(message)
    if not ids:
        raise DemoError("the answer was empty")
    return Answer(tuple(ids), (len(ids) - at_first) / max(time.monotonic() - began, 1e-9), rounds)


def comparison(all_drafted: Sequence[Answer], drafted: Sequence[Answer], plain: Sequence[Answer]) -> str:
    """Returns a table of both ways' medians, and whether the tokens are the same."""
    fast, slow = (statistics.median(answer.tokens_per_s for answer in side) for side in (drafted, plain))
    ratio = fast / slow
    verdict = f"{ratio:.2f} times as fast"
    if ratio < 1:
        verdict += ": drafting costs more here than it saves"
    rows = [
        ("", "speculation", "without", ""),
        ("tokens/s", f"{fast:.1f}", f"{slow:.1f}", verdict),
        *[("tokens a round", *(_per_round(side) for side in (drafted, plain)), "")],
        ("tokens", str(len(drafted[-1].token_ids)), str(len(plain[-1].token_ids)), same_tokens(all_drafted, plain)),
    ]
    lines = [f"{name:<14}  {a:>11}  {b:>8}   {note}".rstrip() for name, a, b, note in rows]
    return "\n".join([*lines, f"(medians of {len(drafted)} answers each, in turns)"])


def _per_round(answers: Sequence[Answer]) -> str:
    rounds = sum(answer.rounds for answer in answers)
    return f"{sum(len(answer.token_ids) for answer in answers) / rounds:.2f}" if rounds else "?"


def same_tokens(drafted: Sequence[Answer], plain: Sequence[Answer]) -> str:
    """Returns one remark about all answers."""
    answers = [answer.token_ids for answer in (*drafted, *plain)]
    if len(set(answers)) == 1:
        return "the same ones, each time"
    agree = next(
        (index for index, column in enumerate(zip(*answers, strict=False)) if len(set(column)) > 1),
        min(map(len, answers)),
    )
    return f"NOT the same: they differ from token {agree + 1} on"


if __name__ == "__main__":
    sys.exit(main())
