"""``outrider top``: replicas, rounds, links and drafters of a running server, live.

Everything is read from ``/metrics``. Without HTTP the gRPC status of one replica has to do, and the first line says so.
A row a replica, and below it where its rounds' time goes, its link, its drafter; then what drafters have learned.
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

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from outrider.deploy.cli.connection import Tls, add_connection_arguments, tls_of
from outrider.deploy.cli.versions import learning_lines
from outrider.deploy.client.sync_client import DEFAULT_ADDRESS, OutriderClient, OutriderError
from outrider.deploy.top import (
    DrafterView,
    LinkView,
    ReplicaView,
    RoundView,
    ScalingView,
    Scrape,
    ScrapeError,
    View,
    scrape,
    view,
    view_of_status,
)

DEFAULT_HTTP_PORT = 8000

_BAR_WIDTH = 24
_INDENT = "  "
_NOTHING = "-"
_MOST_VERSIONS = 4
_COLUMNS = (
    ("REPLICA", 10), ("STATE", 6), ("RUN", 5), ("WAIT", 5), ("KV", 5), ("TOK/S", 8), ("REQ/S", 7), ("ACC LEN", 8),
    ("ACC", 5), ("HIT", 5), ("K", 5), ("LATE/S", 7), ("DEGRADED", 9),
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("address", metavar="ADDRESS", nargs="?", default=DEFAULT_ADDRESS,
                        help="gRPC address of the server (default: %(default)s)")  # fmt: skip
    parser.add_argument(
        "--http", metavar="HOST:PORT", help=f"HTTP address (default: ADDRESS's host, port {DEFAULT_HTTP_PORT})"
    )
    parser.add_argument("--interval", metavar="SECONDS", type=_interval, default=1.0, help="between two looks")
    parser.add_argument("--once", action="store_true", help="print what one interval shows, and exit")
    parser.add_argument("--json", action="store_true", help="one JSON object a look, one a line")
    add_connection_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Show it until asked to stop. Returns the exit status."""
    http = args.http or f"{args.address.rpartition(':')[0] or '127.0.0.1'}:{DEFAULT_HTTP_PORT}"
    try:
        tls = tls_of(args)
    except ValueError as error:
        print(f"outrider: {error}", file=sys.stderr)
        return 2
    context = tls.context() if tls is not None else None
    source = Source(lambda: scrape(http, context), lambda: _status(args.address, tls))
    try:
        source.look()
        if args.once:
            time.sleep(args.interval if source.has_rates else 0)
            _print(source, args.json)
        elif args.json or not sys.stdout.isatty():
            _repeat(lambda: _print(source, args.json), args.interval)
        else:
            with _keys_unechoed(), Live(screen=True, auto_refresh=False) as live:
                _repeat(lambda: live.update(picture(source.look(), source.note), refresh=True), args.interval)
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


def picture(view: View, note: str = "") -> RenderableType:
    """Cut off, not squeezed, where the screen is narrower. note: for the first line, such as that the server does not
    answer."""
    parts: list[RenderableType] = [_line(_header(view, note), "bold"), "", _table(show_header=True)]
    for replica in view.replicas:
        row = _table(show_header=False)
        row.add_row(*_cells(replica), style="" if replica.up else "red")
        parts += [row, *(_line(f"{_INDENT}{text}", style) for text, style in _details(replica))]
    if not view.replicas:
        parts.append(_line("no replica has answered yet", "red"))
    if view.learning is not None:
        parts += ["", *(_line(text, "") for text in learning_lines(view.learning, most=_MOST_VERSIONS))]
    return Group(*parts)


def _line(text: str, style: str) -> Text:
    return Text(text, style, no_wrap=True, overflow="crop")


def _table(show_header: bool) -> Table:
    """Of the widths that every replica's has: its own lines stand between it and the next one's. The first two columns
    are text and stand left, the numbers right."""
    table = Table(box=None, show_header=show_header, header_style="dim", pad_edge=False, padding=(0, 1, 0, 0))
    table.width = sum(width + 1 for _, width in _COLUMNS) - 1  # else a narrow screen would squeeze the columns
    for index, (name, width) in enumerate(_COLUMNS):
        table.add_column(name, width=width, no_wrap=True, overflow="crop", justify="left" if index < 2 else "right")
    return table


def _header(view: View, note: str) -> str:
    targets = [replica for replica in view.replicas if not replica.is_pooled]
    pooled = len(view.replicas) - len(targets)
    up = [replica for replica in targets if replica.up]
    model = next((replica.model for replica in up), "outrider")
    parts = [
        f"outrider · {model}",
        f"{len(up)} of {len(targets)} replicas up",
        f"a pool of {pooled}" if pooled else "",
        _scaling(view.scaling),
        f"{sum(replica.running for replica in up)} running, {sum(replica.waiting for replica in up)} waiting",
        f"{view.tokens_per_s:.1f} tok/s" if view.interval_s else "",
        f"{view.rejected_per_s:.1f} rejected/s" if view.rejected_per_s else "",
        note,
    ]
    return " · ".join(part for part in parts if part)


def _scaling(scaling: ScalingView | None) -> str:
    return "" if scaling is None else f"{scaling.wanted} of at most {scaling.most} wanted ({scaling.reason})"


def _cells(replica: ReplicaView) -> list[Text]:
    if not replica.up:
        cells = ["silent", *[_NOTHING] * (len(_COLUMNS) - 2)]
    elif replica.is_pooled:
        cells = ["drafts", *[_NOTHING] * (len(_COLUMNS) - 2)]
    else:
        cells = [
            "up",
            str(replica.running),
            str(replica.waiting),
            f"{replica.kv_cache_usage:.0%}",
            f"{replica.tokens_per_s:.1f}",
            f"{replica.requests_per_s:.1f}",
            _number(replica.acceptance_length, 2),
            _share(replica.acceptance_rate),
            _share(replica.hit_rate),
            _number(replica.chosen_k, 1),
            f"{replica.late_per_s:.1f}",
            str(replica.degraded_requests),
        ]
    # The end of a long name is what tells it from the others.
    return [Text(replica.replica[-_COLUMNS[0][1] :]), *map(Text, cells)]


def _details(replica: ReplicaView) -> list[tuple[str, str]]:
    """(text, style) of each line."""
    details = []
    if replica.round is not None:
        details.append((_round(replica.round), ""))
    if replica.link is not None:
        details.append((_link(replica.link), "" if replica.link.state == "up" else "red"))
    if replica.drafter is not None:
        details.append((_drafter(replica.drafter, replica.is_pooled), "" if replica.drafter.up else "red"))
    return details


def _round(round_: RoundView) -> str:
    parts = {"target": round_.target_ms, "draft": round_.draft_ms, "other": round_.other_ms}
    split = " · ".join(f"{name} {value:.1f}" for name, value in parts.items())
    return f"round {round_.period_ms:.1f} ms  {_bar(list(parts.values()))}  {split} · waited {round_.wait_ms:.1f}"


def _bar(parts: list[float]) -> str:
    """Target, draft and the rest by their share of a round."""
    whole = sum(parts) or 1.0
    ends = [round(_BAR_WIDTH * sum(parts[: index + 1]) / whole) for index in range(len(parts))]
    starts = [0, *ends[:-1]]
    return "".join(mark * (end - start) for mark, start, end in zip("█▒·", starts, ends, strict=True))


def _link(link: LinkView) -> str:
    reconnects = f", {link.reconnects} reconnect{'s' * (link.reconnects != 1)}" if link.reconnects else ""
    over = f" over {link.backend}" if link.backend else ""
    return f"link {link.state}{over}, epoch {link.epoch}{reconnects}, round trip {link.rtt_us:.0f} us"


def _drafter(drafter: DrafterView, is_pooled: bool) -> str:
    if not drafter.up:
        return "drafter does not answer"
    step = f", step {drafter.step_ms:.1f} ms" if drafter.step_ms is not None else ""
    of = f" of {drafter.links} target{'s' * (drafter.links != 1)}" if is_pooled else ""
    load = f"{drafter.sequences} sequences{of}, {drafter.prefilling} prefilling, KV {drafter.kv_cache_usage:.0%}"
    version = f", version {drafter.version}" if drafter.version is not None else ""
    return f"drafter {load}{step}{version}"


def _number(value: float | None, digits: int) -> str:
    return _NOTHING if value is None else f"{value:.{digits}f}"


def _share(value: float | None) -> str:
    return _NOTHING if value is None else f"{value:.0%}"


def _status(address: str, tls: Tls | None = None) -> View:
    with OutriderClient(address, credentials=tls.credentials() if tls is not None else None) as client:
        return view_of_status(client.status())


def _print(source: Source, as_json: bool) -> None:
    shown = source.look()
    if as_json:
        print(json.dumps({**asdict(shown), "tokens_per_s": shown.tokens_per_s, "note": source.note}), flush=True)
        return
    console = Console(width=shutil.get_terminal_size((120, 40)).columns)
    with console.capture() as lines:
        console.print(picture(shown, source.note))
    print(lines.get(), end="", flush=True)  # not by the console, which ends the process at a closed pipe


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
def _keys_unechoed() -> Iterator[None]:
    """Each key is read as it is typed and not shown; the terminal is as it was afterwards."""
    import termios
    import tty

    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not in 0.1 to 3600 seconds")
    return seconds
