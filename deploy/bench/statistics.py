"""From chunks to figures: speed, latencies, acceptance, the ratio of the two sides and its spread. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from deploy.bench.answers import Answer, Chunk

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
