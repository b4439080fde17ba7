"""What the server counted between two looks at its status: rounds, drafts, hits of the lookahead, a round's time."""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from outrider.v1 import generation_pb2 as pb

HITS = {"main_line": "main_line_hits", "side_branch": "side_branch_hits", "miss": "misses"}
"""Name in the report -> counter of RoundStatistics. A server that does not draft ahead has none."""


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
