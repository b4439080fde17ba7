"""What the server counted between two looks at its status: rounds, drafts, hits of the lookahead, a round's time."""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from outrider.v1 import generation_pb2 as pb

HITS = {"main_line": "main_line_hits", "side_branch": "side_branch_hits", "miss": "misses"}
"""Name in the report -> counter of RoundStatistics. A server that does not draft ahead has none."""


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
