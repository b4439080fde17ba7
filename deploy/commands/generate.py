"""``outrider generate PROMPT``: one request to a running server, streamed to the terminal or printed as JSON.

Exit status: 0 the answer is complete, 1 the call failed (one line on stderr says why), 2 the command line is wrong,
130 interrupted (the request is then cancelled on the server).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from deploy.client.sync_client import OutriderClient, OutriderError
from deploy.generate.arguments import add_arguments, options_of
from deploy.generate.output import as_json, print_stream

__all__ = ["add_arguments", "as_json", "run"]


def run(args: argparse.Namespace) -> int:
    """Send the request and print the answer. Returns the exit status."""
    options = options_of(args)
    if not args.json and ("logprobs" in options or "prompt_logprobs" in options):
        return _fail("--logprobs and --prompt-logprobs are printed with --json only; add it", status=2)
    try:
        prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
        with OutriderClient(args.address) as client, _interrupt_closes(client):
            if args.json:
                print(json.dumps(as_json(client.generate(prompt, **options))), flush=True)
            else:
                print_stream(client, prompt, options)
    except OutriderError as error:
        return _fail(str(error))
    except UnicodeDecodeError as error:
        return _fail(f"standard input is not text: {error}", status=2)
    except KeyboardInterrupt:
        return _fail("interrupted", status=130)
    except BrokenPipeError:
        # Whoever read our output has had enough. Leave the interpreter nothing to flush into the closed pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


@contextmanager
def _interrupt_closes(client: OutriderClient) -> Iterator[None]:
    """Ctrl-C closes the client, which ends its calls, and raises KeyboardInterrupt here. Raised wherever the main
    thread happens to be, as Python does, it is lost when that is a destructor."""
    interrupted = threading.Event()

    def close(*_: object) -> None:
        if not interrupted.is_set():
            interrupted.set()
            # Not by this thread: it may hold the locks that closing takes.
            threading.Thread(target=client.close, daemon=True).start()

    before = signal.signal(signal.SIGINT, close)
    try:
        yield
    except Exception:
        if not interrupted.is_set():
            raise
    finally:
        signal.signal(signal.SIGINT, before)
    if interrupted.is_set():
        raise KeyboardInterrupt


def _fail(message: str, status: int = 1) -> int:
    print(f"outrider: {' '.join(message.split())}", file=sys.stderr)
    return status
