"""``outrider top``: replicas, rounds, links and drafters of a running server, live.

Everything is read from ``/metrics``. Without HTTP the gRPC status of one replica has to do, and the first line says so.
Exit status: 0 ended by q or Ctrl-C, or the one look was had; 1 the server does not answer.
"""

from __future__ import annotations

import argparse
import json
import select
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict

from deploy.client.sync_client import DEFAULT_ADDRESS, OutriderClient, OutriderError
from deploy.top.render import render
from deploy.top.scrape import Scrape, ScrapeError, scrape
from deploy.top.status import view_of_status
from deploy.top.view import View, view

DEFAULT_HTTP_PORT = 8000

_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_HOME, _END_OF_LINE, _REST = "\x1b[H", "\x1b[K", "\x1b[J"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("address", metavar="ADDRESS", nargs="?", default=DEFAULT_ADDRESS,
                        help="gRPC address of the server (default: %(default)s)")  # fmt: skip
    parser.add_argument(
        "--http", metavar="HOST:PORT", help=f"HTTP address (default: ADDRESS's host, port {DEFAULT_HTTP_PORT})"
    )
    parser.add_argument("--interval", metavar="SECONDS", type=_interval, default=1.0, help="between two looks")
    parser.add_argument("--once", action="store_true", help="print what one interval shows, and exit")
    parser.add_argument("--json", action="store_true", help="one JSON object a look, one a line")


def run(args: argparse.Namespace) -> int:
    """Show it until asked to stop. Returns the exit status."""
    http = args.http or f"{args.address.rpartition(':')[0] or '127.0.0.1'}:{DEFAULT_HTTP_PORT}"
    source = Source(lambda: scrape(http), lambda: _status(args.address))
    try:
        source.look()
        if args.once:
            time.sleep(args.interval if source.has_rates else 0)
            _print(source, args.json)
        elif args.json or not sys.stdout.isatty():
            _repeat(lambda: _print(source, args.json), args.interval)
        else:
            with _screen():
                _repeat(lambda: _draw(source), args.interval)
    except SourceError as error:
        print(f"outrider: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, BrokenPipeError):
        pass
    return 0


class SourceError(Exception):
    """Neither way to ask the server works. The message says of both why."""


class Source:
    """Where looks come from. The first one decides: HTTP when that answers, else gRPC."""

    def __init__(self, by_http: Callable[[], Scrape], by_grpc: Callable[[], View]) -> None:
        self._by_http, self._by_grpc = by_http, by_grpc
        self._before: Scrape | None = None
        self._last: View | None = None
        self.has_rates = False
        self.note = ""
        """Why a look is not what it should be; empty when it is."""

    def look(self) -> View:
        """A server that stops answering leaves the last view, and a note. Raises SourceError for the first look."""
        try:
            self._last, self.note = self._take(), ""
        except (ScrapeError, OutriderError) as error:
            if self._last is None:
                raise SourceError(str(error)) from None
            self.note = f"NO ANSWER: {error}"
        if not self.has_rates and not self.note:
            self.note = "gRPC status of one replica; --http shows all"
        return self._last

    def _take(self) -> View:
        if self._last is not None and not self.has_rates:
            return self._by_grpc()
        try:
            now = self._by_http()
        except ScrapeError as error:
            if self._last is not None:
                raise
            try:
                return self._by_grpc()
            except OutriderError as second:
                raise ScrapeError(f"{error}; {second}") from None
        self.has_rates = True
        before, self._before = self._before, now
        return view(before, now)


def _status(address: str) -> View:
    with OutriderClient(address) as client:
        return view_of_status(client.status())


def _print(source: Source, as_json: bool) -> None:
    shown = source.look()
    if as_json:
        print(json.dumps({**asdict(shown), "tokens_per_s": shown.tokens_per_s, "note": source.note}), flush=True)
    else:
        print("\n".join(render(shown, width=shutil.get_terminal_size((120, 40)).columns, note=source.note)), flush=True)


def _draw(source: Source) -> None:
    shown = source.look()
    size = shutil.get_terminal_size()
    lines = render(shown, width=size.columns, colour=True, note=source.note)[: size.lines]
    sys.stdout.write(_HOME + "".join(f"{line}{_END_OF_LINE}\n" for line in lines).rstrip("\n") + _REST)
    sys.stdout.flush()


def _repeat(show: Callable[[], None], interval_s: float) -> None:
    """Until q is typed, where there is somebody to type."""
    while True:
        show()
        if sys.stdin.isatty() and sys.stdout.isatty():
            if select.select([sys.stdin], [], [], interval_s)[0] and sys.stdin.read(1) in ("q", "Q", ""):
                return
        else:
            time.sleep(interval_s)


@contextmanager
def _screen() -> Iterator[None]:
    """The terminal's second screen, without echo; as it was afterwards."""
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin) if sys.stdin.isatty() else None
    sys.stdout.write(_ENTER)
    try:
        if before is not None:
            tty.setcbreak(sys.stdin)
        yield
    finally:
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()
        if before is not None:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not in 0.1 to 3600 seconds")
    return seconds
