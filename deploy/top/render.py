"""``outrider top`` as text: a row a replica, and below it where its rounds' time goes, its link, its drafter. Pure."""

from __future__ import annotations

from deploy.top.view import DrafterView, LinkView, ReplicaView, RoundView, View

_BOLD, _DIM, _RED, _PLAIN = "\x1b[1m", "\x1b[2m", "\x1b[31m", "\x1b[0m"
_BAR_WIDTH = 24
_INDENT = "  "
_NOTHING = "-"
_COLUMNS = (
    ("REPLICA", 10), ("STATE", 6), ("RUN", 5), ("WAIT", 5), ("KV", 5), ("TOK/S", 8), ("REQ/S", 7), ("ACC LEN", 8),
    ("ACC", 5), ("HIT", 5), ("K", 5), ("LATE/S", 7), ("DEGRADED", 9),
)  # fmt: skip


def render(view: View, *, width: int = 100, colour: bool = False, note: str = "") -> list[str]:
    """Lines, none longer than width. note: for the first line, such as that the server does not answer."""
    lines = [(_header(view, note), _BOLD), ("", ""), (_row([name for name, _ in _COLUMNS]), _DIM)]
    for replica in view.replicas:
        lines.append((_row(_cells(replica)), "" if replica.up else _RED))
        lines += [(f"{_INDENT}{text}", style) for text, style in _details(replica)]
    if not view.replicas:
        lines.append(("no replica has answered yet", _RED))
    return [f"{style}{text[:width]}{_PLAIN}" if colour and style else text[:width] for text, style in lines]


def _header(view: View, note: str) -> str:
    up = [replica for replica in view.replicas if replica.up]
    model = next((replica.model for replica in up), "outrider")
    parts = [
        f"outrider · {model}",
        f"{len(up)} of {len(view.replicas)} replicas up",
        f"{sum(replica.running for replica in up)} running, {sum(replica.waiting for replica in up)} waiting",
        f"{view.tokens_per_s:.1f} tok/s" if view.interval_s else "",
        f"{view.rejected_per_s:.1f} rejected/s" if view.rejected_per_s else "",
        note,
    ]
    return " · ".join(part for part in parts if part)


def _row(cells: list[str]) -> str:
    """The first two columns are text and stand left, the numbers right; a cell that is too long loses its start."""
    padded = []
    for index, (cell, (_, width)) in enumerate(zip(cells, _COLUMNS, strict=True)):
        padded.append(cell[-width:].ljust(width) if index < 2 else cell.rjust(width))
    return " ".join(padded).rstrip()


def _cells(replica: ReplicaView) -> list[str]:
    if not replica.up:
        return [replica.replica, "silent", *[_NOTHING] * (len(_COLUMNS) - 2)]
    return [
        replica.replica,
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


def _details(replica: ReplicaView) -> list[tuple[str, str]]:
    details = []
    if replica.round is not None:
        details.append((_round(replica.round), ""))
    if replica.link is not None:
        details.append((_link(replica.link), "" if replica.link.state == "up" else _RED))
    if replica.drafter is not None:
        details.append((_drafter(replica.drafter), "" if replica.drafter.up else _RED))
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
    return f"link {link.state}, epoch {link.epoch}{reconnects}, round trip {link.rtt_us:.0f} us"


def _drafter(drafter: DrafterView) -> str:
    if not drafter.up:
        return "drafter does not answer"
    step = f", step {drafter.step_ms:.1f} ms" if drafter.step_ms is not None else ""
    return (
        f"drafter {drafter.sequences} sequences, {drafter.prefilling} prefilling, KV {drafter.kv_cache_usage:.0%}{step}"
    )


def _number(value: float | None, digits: int) -> str:
    return _NOTHING if value is None else f"{value:.{digits}f}"


def _share(value: float | None) -> str:
    return _NOTHING if value is None else f"{value:.0%}"
