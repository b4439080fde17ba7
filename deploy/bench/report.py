"""From chunks to figures, and from figures to what a run says: one JSON document, and a table of it for people. Pure.

Figures are speed, latencies, acceptance, the ratio of the two sides and its spread, and what our server counted between
two looks at its status: rounds, drafts, hits of the lookahead, a round's time.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

import numpy as np
from google.protobuf.descriptor import FieldDescriptor

from outrider.deploy.bench.load import QUIET_CORES, Answer, Chunk
from outrider.v1 import generation_pb2 as pb

HITS = {"main_line": "main_line_hits", "side_branch": "side_branch_hits", "miss": "misses"}
"""Name in the report -> counter of RoundStatistics. A server that does not draft ahead has none."""


FORMAT = 1
"""Goes up when a key of the document changes its meaning."""

Report = dict[str, Any]


def rounds_of(before: pb.RoundStatistics, after: pb.RoundStatistics) -> dict[str, Any]:
    """A side's part of the report: what it counted in between, and where its rounds' time went."""
    counted = rounds_between(before, after)
    times = round_time(after)
    return {"rounds": counted, "lookahead": lookahead(counted), "round_time": times, "bound": bound(counted, times)}


def rounds_between(before: pb.RoundStatistics, after: pb.RoundStatistics) -> dict[str, int]:
    """Every counter of RoundStatistics, as a difference."""
    counters = [
        field.name
        for field in pb.RoundStatistics.DESCRIPTOR.fields
        if field.cpp_type in (FieldDescriptor.CPPTYPE_UINT64, FieldDescriptor.CPPTYPE_UINT32)
    ]
    return {name: getattr(after, name) - getattr(before, name) for name in counters}


def lookahead(counted: dict[str, int]) -> dict[str, Any] | None:
    """Shares of the main line, a side branch and a miss, and the hit rate; None when nothing was looked up."""
    counts = {name: counted.get(counter, 0) for name, counter in HITS.items()}
    total = sum(counts.values())
    if not total:
        return None
    shares = {name: count / total for name, count in counts.items()}
    return {**shares, "hit_rate": 1.0 - shares["miss"], "lookups": total}


def round_time(after: pb.RoundStatistics) -> dict[str, float]:
    """Medians over the server's last steps, by the names of RoundTime, and one draft step where the server reports it.
    Empty: it has run no step."""
    if not after.HasField("median"):
        return {}
    times = {field.name: getattr(after.median, field.name) for field in pb.RoundTime.DESCRIPTOR.fields}
    if step_ms := getattr(after, "draft_step_ms", 0.0):
        times["draft_step_ms"] = step_ms
    return times


def bound(counted: dict[str, int], times: dict[str, float]) -> dict[str, float] | None:
    """What no schedule of one request's rounds can beat, from the step times of the same run.

    With a target step T, a draft step d and k drafts a round: a main line's hit takes max(T, (k + 1) d), one more
    draft step than drafts to learn the bonus token; a side branch's max(T, k d); a miss T + k d. ``period_ms`` is their
    mean by how often each was; ``share`` is that over the period measured: what was reached, at concurrency 1.
    None where nothing was drafted ahead, or no draft step was reported.
    """
    hits, draft_ms = lookahead(counted), times.get("draft_step_ms", 0.0)
    if hits is None or not draft_ms or not counted["drafted_rounds"]:
        return None
    k, target_ms = counted["drafted"] / counted["drafted_rounds"], times["target_ms"]
    period_ms = (
        hits["main_line"] * max(target_ms, (k + 1) * draft_ms)
        + hits["side_branch"] * max(target_ms, k * draft_ms)
        + hits["miss"] * (target_ms + k * draft_ms)
    )
    return {
        "k": k,
        "period_ms": period_ms,
        "tok_per_s": 1e3 * (1.0 + counted["accepted"] / counted["rounds"]) / period_ms,
        "share": period_ms / times["period_ms"],
    }


Figures = dict[str, Any]


def side_figures(chunks: Sequence[Chunk], units: int | None, unit: str) -> Figures:
    """Of one side's chunks. units: cores or accelerators it may use, None when not known; unit: ``core`` or
    ``accelerator``."""
    answers = [answer for chunk in chunks for answer in chunk.answers]
    seconds = sum(chunk.seconds for chunk in chunks)
    tokens = sum(chunk.tokens for chunk in chunks)
    return {
        "requests": len(answers),
        "output_tokens": tokens,
        "seconds": seconds,
        "output_tok_per_s": tokens / seconds,
        f"output_tok_per_s_per_{unit}": tokens / seconds / units if units else None,
        "ttft_ms": _percentiles(answer.ttft_s for answer in answers),
        "inter_token_ms": _percentiles(inter_token_s(answers)),
        "message_gap_ms": _percentiles(gap_s for answer in answers for gap_s, _ in answer.gaps()),
        "latency_ms": _percentiles(answer.ended_s for answer in answers),
        **acceptance(answers),
        "serving": serving(answers),
    }


def inter_token_s(answers: Iterable[Answer]) -> list[float]:
    """One entry a token after an answer's first message: the time since the message before, divided by the tokens
    of its own message, since a round delivers several at once."""
    return [gap_s / tokens for answer in answers for gap_s, tokens in answer.gaps() for _ in range(tokens)]


def acceptance(answers: Sequence[Answer]) -> Figures:
    """Accepted / drafted, and tokens committed per drafted round with the target's own; None where nothing was
    drafted."""
    rounds, drafted, accepted = (
        sum(getattr(answer, name) for answer in answers) for name in ("drafted_rounds", "drafted", "accepted")
    )
    return {
        "drafted_rounds": rounds,
        "drafted": drafted,
        "accepted": accepted,
        "acceptance_rate": accepted / drafted if drafted else None,
        "acceptance_length": 1 + accepted / rounds if rounds else None,
    }


def serving(answers: Sequence[Answer]) -> Figures | None:
    """What network, proxy, ingress and streaming add to the engine's own times; None where it does not tell them.

    way_ms: of a request and its answer's end, both ways together. added_share: by how much the time between an answer's
    first and last message exceeds the engine's, as a share of it, over all answers.
    """
    told = [answer for answer in answers if answer.engine_decode_s]
    if not told:
        return None
    share = sum(answer.span_s for answer in told) / sum(answer.engine_decode_s or 0.0 for answer in told) - 1
    return {"way_ms": _percentiles(answer.way_s for answer in told), "added_share": share}


def ratio_of(ours: Sequence[Chunk], other: Sequence[Chunk]) -> tuple[float, Figures]:
    """Ours / the other's: (of total throughput, spread over the pairs of chunks)."""
    total = _throughput(ours) / _throughput(other)
    theirs = {chunk.pair: chunk for chunk in other}
    pairs = [chunk.tok_per_s / theirs[chunk.pair].tok_per_s for chunk in ours if chunk.pair in theirs]
    return total, {"min": min(pairs), "median": statistics.median(pairs), "max": max(pairs), "pairs": len(pairs)}


def equal_answers(ours: Sequence[Chunk], other: Sequence[Chunk]) -> Figures:
    """How many prompts got the same tokens from both sides."""
    theirs = {(chunk.pair, answer.index): answer.token_ids for chunk in other for answer in chunk.answers}
    same = [answer.token_ids == theirs[chunk.pair, answer.index] for chunk in ours for answer in chunk.answers]
    return {"same": sum(same), "of": len(same)}


def _throughput(chunks: Sequence[Chunk]) -> float:
    return sum(chunk.tokens for chunk in chunks) / sum(chunk.seconds for chunk in chunks)


def _percentiles(seconds: Iterable[float | None]) -> Figures:
    """p50 and p99 in milliseconds, linear between ranks; None where there is no value."""
    values = [value * 1e3 for value in seconds if value is not None]
    if not values:
        return {"p50": None, "p99": None}
    p50, p99 = np.percentile(values, [50, 99])
    return {"p50": float(p50), "p99": float(p99)}


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
