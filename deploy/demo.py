"""``make demo``: fetch a small model, serve it, stream one answer, show where its rounds' time went, leave nothing.

Exit code 0 only when the answer came, and no process and no shared-memory segment is left.
"""

from __future__ import annotations

import selectors
import signal
import subprocess
import sys
import time

import psutil

from deploy.client.sync_client import OutriderClient, OutriderError
from deploy.processes import SharedMemoryWatch, adopt_orphans, descendants, describe, end_descendants
from deploy.progress import Progress
from outrider.v1 import generation_pb2 as pb

PRESET = "smollm2"
PROMPT = (
    "Copy this list, then write it once more:\n"
    "alpha, bravo, charlie, delta, echo, foxtrot, golf, hotel, india, juliett\n"
    "alpha, bravo, charlie,"
)
"""A text that repeats itself, which is what prompt lookup drafts well."""

MAX_TOKENS = 128
START_LIMIT_S = 300.0
STOP_LIMIT_S = 90.0


class DemoError(Exception):
    """The demo cannot go on. The message says why."""


def main() -> int:
    progress = Progress()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    adopt_orphans()
    memory = SharedMemoryWatch()
    server: subprocess.Popen[str] | None = None
    owned: list[psutil.Process] = []
    code = 0
    try:
        command = [sys.executable, "-m", "deploy.cli", "serve", PRESET, "--grpc-port", "0", "--http-port", "0"]
        progress.say(f"starting: outrider {' '.join(command[3:])}")
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        line = _first_line(server, memory)
        print(line, flush=True)
        address = line.partition("grpc=")[2].split()[0]
        with OutriderClient(address) as client:
            _stream_answer(client)
            print(round_table(client.status()), flush=True)
        owned = descendants()
        memory.note()
    except (DemoError, OutriderError) as error:
        print(f"outrider: demo: {error}", file=sys.stderr)
        code = 1
    except KeyboardInterrupt:
        code = 130
    finally:
        if server is not None:
            progress.say("shutting down")
            _stop(server)
    left = _left_behind(owned, memory)
    for item in left:
        print(f"outrider: demo: left behind: {item}", file=sys.stderr)
    end_descendants(grace_s=0.0)
    if left:
        return 1
    progress.say(f"the server is down: its {len(owned)} processes are gone, and no shared-memory segment is left")
    return code


def _first_line(server: subprocess.Popen[str], memory: SharedMemoryWatch) -> str:
    """The server's one line on stdout. Its progress goes to our stderr meanwhile."""
    assert server.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(server.stdout, selectors.EVENT_READ)
        limit = time.monotonic() + START_LIMIT_S
        while not selector.select(5.0):
            if time.monotonic() > limit:
                raise DemoError(f"the server was not ready after {START_LIMIT_S:.0f} s")
            memory.note()
    line = server.stdout.readline().strip()
    if not line:
        raise DemoError(f"the server ended with exit code {server.wait()} before it could answer")
    return line


def _stream_answer(client: OutriderClient) -> None:
    print(f"\n{PROMPT}\033[1m" if sys.stdout.isatty() else f"\n{PROMPT}", end="", flush=True)
    started = first = time.monotonic()
    last: pb.GenerateStreamResponse | None = None
    with client.stream(PROMPT, temperature=0.0, max_tokens=MAX_TOKENS) as messages:
        for message in messages:
            if last is None:
                first = time.monotonic()
            print(message.text_delta, end="", flush=True)
            last = message
    ended = time.monotonic()
    print("\033[0m\n" if sys.stdout.isatty() else "\n", flush=True)
    if last is None:
        raise DemoError("the answer was empty")
    tokens = last.usage.completion_tokens
    spec = last.metrics.speculative_decoding
    print(
        f"{tokens} tokens, first after {first - started:.2f} s, "
        f"then {(tokens - 1) / max(ended - first, 1e-9):.1f} tok/s; "
        f"accepted {spec.num_accepted_draft_tokens} of {spec.num_draft_tokens} drafted tokens in {spec.num_spec_steps} "
        f"drafted rounds ({spec.mean_acceptance_length:.2f} tokens a round)"
    )


def round_table(status: pb.GetServerStatusResponse) -> str:
    """Counts of all rounds since the server started, and the medians of where a round's time went."""
    rounds, median = status.rounds, status.rounds.median
    rows = [
        ("rounds", f"{rounds.rounds}"),
        ("  with drafts", f"{rounds.drafted_rounds}"),
        ("  too late for their drafts", f"{rounds.late_rounds}"),
        ("tokens drafted", f"{rounds.drafted}"),
        ("  accepted", f"{rounds.accepted} ({rounds.acceptance_rate:.0%})"),
        ("mean acceptance length", f"{rounds.mean_acceptance_length:.2f}"),
        ("", ""),
        (f"a round's time, median of {median.samples}", f"{median.period_ms:.2f} ms"),
        ("  target step", f"{median.target_ms:.2f} ms"),
        ("  draft step", f"{median.draft_ms:.2f} ms"),
        ("  target waiting for drafts", f"{median.wait_ms:.2f} ms"),
        ("  outside target and draft steps", f"{median.other_ms:.2f} ms"),
        ("", ""),
        ("link round trip", f"{status.link.rtt_us:.0f} µs ({pb.LinkState.Name(status.link.state)[11:].lower()})"),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}".rstrip() for name, value in rows) + "\n"


def _stop(server: subprocess.Popen[str]) -> None:
    if server.poll() is None:
        server.send_signal(signal.SIGINT)
    try:
        server.wait(STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


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
