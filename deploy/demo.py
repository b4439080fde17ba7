"""``make demo``: fetch a small model, serve it, show one answer with speculation and without, leave nothing behind.

Exit code 0 only when the answers came, and no process and no shared-memory segment is left.
"""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import psutil

from outrider.deploy.bench.machine import BenchError
from outrider.deploy.bench.servers import ServerProcess
from outrider.deploy.client.sync_client import OutriderClient, OutriderError
from outrider.deploy.processes import SharedMemoryWatch, adopt_orphans, descendants, describe, end_descendants
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
MAX_WIDTH = 88

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
    adopt_orphans()
    memory = SharedMemoryWatch()
    server = ServerProcess(PRESET, "--dtype", DTYPE)
    limit = time.monotonic() + START_LIMIT_S

    def waiting() -> None:
        memory.note()
        if time.monotonic() > limit:
            raise DemoError(f"the server was not ready after {START_LIMIT_S:.0f} s")

    owned: list[psutil.Process] = []
    code = 0
    try:
        progress.say(f"starting: outrider serve {PRESET} --dtype {DTYPE}")
        address = server.start(waiting)
        print(server.line, flush=True)
        with OutriderClient(address) as client:
            show(client, progress)
            print(round_summary(client.status()), flush=True)
        owned = descendants()
        memory.note()
    except (DemoError, BenchError, OutriderError) as error:
        print(f"outrider: demo: {error}", file=sys.stderr)
        code = 1
    except KeyboardInterrupt:
        code = 130
    finally:
        progress.say("shutting down")
        server.stop()
    left = _left_behind(owned, memory)
    for item in left:
        print(f"outrider: demo: left behind: {item}", file=sys.stderr)
    end_descendants(grace_s=0.0)
    if left:
        return 1
    if code == 0:
        progress.say(f"the server is down: its {len(owned)} processes are gone, and no shared-memory segment is left")
        print(next_commands(), flush=True)
    return code


def show(client: OutriderClient, progress: Progress, out: TextIO | None = None) -> None:
    """One answer as it comes, then the same request with and without speculation, in turns, and what that gives.

    Raises DemoError for an answer without tokens, OutriderError."""
    out = out or sys.stdout
    colour = out.isatty() and "NO_COLOR" not in os.environ
    width = min(MAX_WIDTH, shutil.get_terminal_size((MAX_WIDTH, 24)).columns - 2)
    text = Wrapped(out, width, colour)
    print(file=out)
    text.write(PROMPT, _DIM)
    text.end()
    print(file=out)
    texts: dict[int, str] = {}

    def text_of(token_id: int) -> str:
        if token_id not in texts:
            texts[token_id] = client.detokenize([token_id]).text
        return texts[token_id]

    def write(message: pb.GenerateStreamResponse) -> None:
        for piece, accepted in pieces(message, text_of):
            text.write(piece, _ACCEPTED if accepted else "")

    first = _ask(client, True, write)  # warms up what is set up lazily, as the next does for plain steps
    text.end()
    if colour:
        print(f"\n{_ACCEPTED}Green{_PLAIN}: drafted and accepted. The rest: the target's own.", file=out)
    print(file=out, flush=True)
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


def pieces(message: pb.GenerateStreamResponse, text_of: Callable[[int], str]) -> list[tuple[str, bool]]:
    """A message's text in parts, each with whether it was an accepted draft.

    One part that counts as the target's where the tokens' own texts do not make up the message's: a character's bytes,
    or a stop string, may be spread over several tokens.
    """
    texts = [text_of(token_id) for token_id in message.token_ids]
    if len(message.origins) == len(texts):
        parts = [
            (text, origin == pb.TOKEN_ORIGIN_ACCEPTED) for text, origin in zip(texts, message.origins, strict=True)
        ]
        while parts and "".join(text for text, _ in parts) != message.text_delta:
            parts.pop()  # an end token has text of its own, and the answer has not
        if parts:
            return parts
    return [(message.text_delta, False)]


class Wrapped:
    """Text that arrives in pieces, broken between words at ``width`` columns."""

    def __init__(self, out: TextIO, width: int, colour: bool) -> None:
        self._out, self._width, self._colour = out, width, colour
        self._column = 0
        self._word: list[tuple[str, str]] = []
        self._space = ""

    def write(self, text: str, style: str = "") -> None:
        """style: an escape sequence, or nothing."""
        for character in text:
            if not character.isspace():
                self._word.append((character, style))
                continue
            self._put_word()
            if character == "\n":
                self._line()
            else:
                self._space += character
        self._out.flush()

    def end(self) -> None:
        """The rest, and the end of the line."""
        self._put_word()
        if self._column:
            self._line()
        self._out.flush()

    def _line(self) -> None:
        self._out.write("\n")
        self._column, self._space = 0, ""

    def _put_word(self) -> None:
        if not self._word:
            return
        if self._column and self._column + len(self._space) + len(self._word) > self._width:
            self._line()
        self._out.write(self._space)
        styled = ""
        for character, style in self._word:
            if self._colour and style != styled:
                self._out.write(_PLAIN + style)
                styled = style
            self._out.write(character)
        if styled:
            self._out.write(_PLAIN)
        self._column += len(self._space) + len(self._word)
        self._space, self._word = "", []


def comparison(all_drafted: Sequence[Answer], drafted: Sequence[Answer], plain: Sequence[Answer]) -> str:
    """Medians of both ways side by side, and whether the tokens are the same."""
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
    """One remark about all answers."""
    answers = [answer.token_ids for answer in (*drafted, *plain)]
    if len(set(answers)) == 1:
        return "the same ones, each time"
    agree = next(
        (index for index, column in enumerate(zip(*answers, strict=False)) if len(set(column)) > 1),
        min(map(len, answers)),
    )
    return f"NOT the same: they differ from token {agree + 1} on"


def round_summary(status: pb.GetServerStatusResponse) -> str:
    """Where a round's time goes, in the medians of the rounds since the server started."""
    median, link = status.rounds.median, status.link
    return (
        f"A round takes {median.period_ms:.1f} ms (median of {median.samples}): target step {median.target_ms:.1f}, "
        f"waiting for drafts {median.wait_ms:.1f},\nall else {median.other_ms:.1f}. A draft step takes "
        f"{status.rounds.draft_step_ms:.2f} ms, the link's round trip {link.rtt_us / 1e3:.2f} ms.\n"
    )


def next_commands() -> str:
    """Three to try next, as they are typed from here."""
    program = Path(sys.executable).parent / "outrider"
    here = Path.cwd()
    name = str(program.relative_to(here)) if program.is_relative_to(here) else str(program)
    rows = [
        (f"{name} serve {PRESET}", "then http://127.0.0.1:8000/ in a browser"),
        (f'{name} generate "The capital of France is"', "in another terminal"),
        (f"{name} top", "the running server, live"),
    ]
    width = max(len(command) for command, _ in rows)
    return "\nNext:\n" + "\n".join(f"  {command:<{width}}  # {what}" for command, what in rows)


def _left_behind(owned: list[psutil.Process], memory: SharedMemoryWatch) -> list[str]:
    """What the server should have taken with it: its processes and their shared memory."""
    alive = {process.pid: process for process in descendants()}
    alive.update({process.pid: process for process in owned if process.is_running()})
    for name in sorted(memory.of_nobody()):
        # Not one we saw it use, but worth a line: another program's, or one of a process that lived only briefly.
        print(f"outrider: demo: note: shared memory {name} is new and nobody uses it", file=sys.stderr)
    return [f"process {describe(process)}" for process in alive.values()] + [
        f"shared memory {name}" for name in sorted(memory.theirs())
    ]


if __name__ == "__main__":
    sys.exit(main())
