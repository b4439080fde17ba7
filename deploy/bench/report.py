"""What a run says: one JSON document, and a table of it for people. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from deploy.bench.answers import QUIET_CORES, Chunk
from deploy.bench.statistics import equal_answers, ratio_of, side_figures

FORMAT = 1
"""Goes up when a key of the document changes its meaning."""

Report = dict[str, Any]


def make_report(
    chunks: Sequence[Chunk],
    settings: dict[str, Any],
    rounds: dict[str, dict[str, Any]],
    units: dict[str, int | None],
    unit: str,
    started: datetime,
    ended: datetime,
) -> Report:
    """The document.

    settings: what was decided before the run, by key of the document; its ``ours`` and ``other`` become their
    ``settings``. rounds: what the sides that are servers of ours
    counted themselves. units: cores or accelerators of each side, None when not known; unit:
    which of the two.
    """
    by_side = {side: [chunk for chunk in chunks if chunk.side == side] for side in units}
    report: Report = {
        "format": FORMAT,
        "started": started.isoformat(timespec="seconds"),
        "ended": ended.isoformat(timespec="seconds"),
        "ratio": None,
        "ratio_spread": None,
        "equal_answers": None,
        **{key: value for key, value in settings.items() if key not in units},
    }
    if "other" in units:
        report["ratio"], report["ratio_spread"] = ratio_of(by_side["ours"], by_side["other"])
        report["equal_answers"] = equal_answers(by_side["ours"], by_side["other"])
    for side, its_chunks in by_side.items():
        report[side] = {
            "settings": settings[side],
            f"{unit}s": units[side],
            **side_figures(its_chunks, units[side], unit),
            **rounds.get(side, {}),
        }
    report["chunks"] = [chunk_row(chunk) for chunk in chunks]
    return report


def chunk_row(chunk: Chunk) -> dict[str, Any]:
    return {
        "pair": chunk.pair,
        "side": chunk.side,
        "seconds": chunk.seconds,
        "output_tokens": chunk.tokens,
        "output_tok_per_s": chunk.tok_per_s,
        "resting_cores": chunk.resting_cores,
        "foreign_cores": chunk.foreign_cores,
        "prompts": [answer.index for answer in chunk.answers],
    }


def table(report: Report) -> str:
    """A column a side, then the ratio, and where our rounds' time went."""
    sides = [side for side in ("ours", "other") if side in report]
    unit = "core" if "cores" in report["ours"] else "accelerator"
    names = [report[side]["settings"]["name"] for side in sides]
    lines = [("", names)]
    for label, show in _rows(unit):
        lines.append((label, [show(report[side]) for side in sides]))
    width = max(len(label) for label, _ in lines)
    columns = [max(len(values[column]) for _, values in lines) for column in range(len(sides))]
    text = [
        f"{label:<{width}}  " + "  ".join(f"{value:>{columns[i]}}" for i, value in enumerate(values))
        for label, values in lines
    ]
    return "\n".join([*text, "", *_below(report)]).rstrip() + "\n"


def _rows(unit: str) -> list[tuple[str, Any]]:
    return [
        ("output tok/s", lambda side: f"{side['output_tok_per_s']:.2f}"),
        (f"  per {unit}", lambda side: _maybe(side[f"output_tok_per_s_per_{unit}"], f"{{:.2f}} ({side[f'{unit}s']})")),
        ("time to first token, ms, p50 / p99", lambda side: _pair(side["ttft_ms"])),
        ("time per token after it, ms, p50 / p99", lambda side: _pair(side["inter_token_ms"])),
        ("whole answer, ms, p50 / p99", lambda side: _pair(side["latency_ms"])),
        ("acceptance rate", lambda side: _maybe(side["acceptance_rate"], "{:.3f}")),
        ("acceptance length", lambda side: _maybe(side["acceptance_length"], "{:.2f}")),
    ]


def _below(report: Report) -> list[str]:
    lines = []
    if report["ratio"] is not None:
        spread = report["ratio_spread"]
        equal = report["equal_answers"]
        lines.append(
            f"ours / other: {report['ratio']:.3f} (by chunk pair: min {spread['min']:.3f}, median "
            f"{spread['median']:.3f}, max {spread['max']:.3f}, {spread['pairs']} pairs)"
        )
        lines.append(f"answers with the same tokens: {equal['same']} of {equal['of']}")
    if spoilt := [row for row in report["chunks"] if (row["foreign_cores"] or 0.0) >= QUIET_CORES]:
        most = max(row["foreign_cores"] for row in spoilt)
        lines.append(
            f"spoilt by other programs: {len(spoilt)} of {len(report['chunks'])} chunks, up to {most:.1f} cores"
        )
    for side in ("ours", "other"):
        lines += _rounds(report.get(side, {}), "our" if side == "ours" else "their", report["load"]["concurrency"])
    return lines


def _rounds(side: dict[str, Any], whose: str, concurrency: int) -> list[str]:
    lines = []
    if hits := side.get("lookahead"):
        lines.append(
            f"{whose} lookahead: {hits['hit_rate']:.1%} hits (main line {hits['main_line']:.1%}, side branch "
            f"{hits['side_branch']:.1%}), {hits['miss']:.1%} misses"
        )
    if times := side.get("round_time"):
        parts = ", ".join(
            f"{name.removesuffix('_ms')} {value:.1f}" for name, value in times.items() if name != "samples"
        )
        lines.append(f"{whose} rounds, ms, median of the last {times['samples']}: {parts}")
    if serving := side.get("serving"):
        lines.append(
            f"{whose} serving (proxy, ingress, streaming): {_pair(serving['way_ms'])} ms p50 / p99 there and back, and "
            f"{serving['added_share']:+.2%} on the time from first message to last"
        )
    if concurrency == 1 and (bound := side.get("bound")):
        lines.append(
            f"bound from {whose} step times: {bound['period_ms']:.1f} ms a round of {bound['k']:.2f} "
            f"drafts, {bound['tok_per_s']:.2f} tok/s; {bound['share']:.1%} of it by the median round"
        )
    return lines


def _pair(percentiles: dict[str, float | None]) -> str:
    return " / ".join(_maybe(percentiles[name], "{:.1f}") for name in ("p50", "p99"))


def _maybe(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)
