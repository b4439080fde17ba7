"""Makes the report of a benchmark from its turns: a JSON document, and a table of it. Pure."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.deploy.bench.load import ACCEPTED, DRAFTED, DRAFTS, GENERATED, Turn

FORMAT = 2
"""Version of the document, which changes with the meaning of a key."""

Report = dict[str, Any]

COMPARED = {"output_throughput": "output tok/s", "mean_ttft_ms": "TTFT", "mean_tpot_ms": "TPOT"}

_T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""97.5% quantiles of Student's t for 1 to 9 degrees of freedom."""


def student_t(freedom: int) -> float:
    """Returns the 97.5% quantile of Student's t, from 10 degrees of freedom by Cornish and Fisher's expansion."""
    if freedom <= len(_T_975):
        return _T_975[freedom - 1]
    z = statistics.NormalDist().inv_cdf(0.975)
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def interval(values: Sequence[float]) -> dict[str, Any]:
    """Returns the geometric mean of ratios with its 95% interval, which a single pair does not have."""
    logs = [math.log(value) for value in values]
    mean = statistics.fmean(logs)
    found = {"ratio": math.exp(mean), "low": None, "high": None, "pairs": len(logs)}
    if len(logs) > 1:
        half = student_t(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
        found |= {"low": math.exp(mean - half), "high": math.exp(mean + half)}
    return found


def ratios(ours: Sequence[Turn], other: Sequence[Turn]) -> dict[str, dict[str, Any] | None]:
    """Returns ours / the other's of each compared figure over pairs of turns; None if a figure is 0."""
    found: dict[str, dict[str, Any] | None] = {}
    for name in COMPARED:
        pairs = [(a.figures[name], b.figures[name]) for a, b in zip(ours, other, strict=True)]
        found[name] = interval([a / b for a, b in pairs]) if all(a > 0 and b > 0 for a, b in pairs) else None
    return found


def same_answers(ours: Sequence[Turn], other: Sequence[Turn]) -> dict[str, int]:
    """Returns how many requests got the same text from both sides."""
    pairs = [pair for a, b in zip(ours, other, strict=True) for pair in zip(a.texts, b.texts, strict=True)]
    return {"same": sum(a == b for a, b in pairs), "of": len(pairs)}


def side(turns: Sequence[Turn]) -> dict[str, Any]:
    """Returns the figures of one side, over all turns and of each."""
    counted: Counter[str] = Counter()
    for turn in turns:
        counted.update(turn.counted)
    seconds = sum(turn.figures["duration"] for turn in turns)
    tokens = sum(turn.figures["total_output_tokens"] for turn in turns)
    means = {name: statistics.fmean(turn.figures[name] for turn in turns) for name in turns[0].figures}
    return {
        **{name: value for name, value in means.items() if name.endswith("_ms")},
        "output_throughput": tokens / seconds,
        "output_tokens": tokens,
        "seconds": seconds,
        **acceptance(counted),
        "counted": dict(counted),
        "turns": [{**turn.figures, "counted": turn.counted} for turn in turns],
    }


def acceptance(counted: Mapping[str, float]) -> dict[str, Any]:
    """Returns acceptance, and the origins of tokens and proposals; None for what the server does not count.

    ``origins`` has shares of the generated tokens, ``lookahead`` shares of the proposals.
    """
    drafts, drafted, accepted = (counted.get(name, 0.0) for name in (DRAFTS, DRAFTED, ACCEPTED))
    generated = counted.get(GENERATED, 0.0)
    looked = {
        name.partition("=")[2].rstrip("}"): count
        for name, count in counted.items()
        if name.startswith("outrider:proposal_origins_total")
    }
    return {
        "acceptance_rate": accepted / drafted if drafted else None,
        "acceptance_length": 1 + accepted / drafts if drafts else None,
        "origins": {"drafts": accepted / generated, "target": 1 - accepted / generated} if generated else None,
        "lookahead": {name: count / sum(looked.values()) for name, count in looked.items()} if looked else None,
    }


def table(report: Report) -> str:
    """Returns a table with a column for each side, then the ratios, the machine and the versions."""
    sides = [report[name] for name in ("ours", "other") if name in report]
    rows: list[tuple[str, list[str]]] = [("", [each["settings"]["name"] for each in sides])]
    rows.append(("output tok/s", [f"{each['output_throughput']:.2f}" for each in sides]))
    for name, label in (("ttft", "TTFT"), ("tpot", "TPOT")):
        figures = (f"mean_{name}_ms", f"median_{name}_ms", f"p99_{name}_ms")
        rows.append(
            (f"{label}, ms, mean / median / p99", [" / ".join(f"{each[key]:.1f}" for key in figures) for each in sides])
        )
    for name in ("acceptance_rate", "acceptance_length"):
        shown = ["–" if each[name] is None else f"{each[name]:.3f}" for each in sides]
        rows.append((name.replace("_", " "), shown))
    rows.append(("tokens that were drafts", [_shares(each["origins"], ("drafts",)) for each in sides]))
    if any(each["lookahead"] for each in sides):
        names = ("main_line", "side_branch", "miss")
        rows.append(("drafted ahead: main line / side / miss", [_shares(each["lookahead"], names) for each in sides]))
    width = max(len(label) for label, _ in rows)
    columns = [max(len(values[column]) for _, values in rows) for column in range(len(sides))]
    lines = [
        f"{label:<{width}}  " + "  ".join(f"{value:>{columns[i]}}" for i, value in enumerate(values))
        for label, values in rows
    ]
    return "\n".join([*lines, "", *_below(report)]).rstrip() + "\n"


def _below(report: Report) -> list[str]:
    lines = []
    if report["ratios"] is not None:
        for name, label in COMPARED.items():
            if (found := report["ratios"][name]) is not None:
                spread = "" if found["low"] is None else f", 95% interval {found['low']:.3f} to {found['high']:.3f}"
                lines.append(f"ours / other, {label}: {found['ratio']:.3f}{spread} ({found['pairs']} pairs)")
        equal = report["same_answers"]
        lines.append(f"same answers: {equal['same']} of {equal['of']}")
    tried = report.get("other", {}).get("settings", {}).get("tried", ())
    lines += [f"tried {each['name']}: {each['tok_per_s']:.2f} tok/s" for each in tried]
    here = report["machine"]
    lines.append(
        ", ".join([here["cpu"], f"{len(here['cores'])} cores", *here["accelerators"]])
        + f", load {here['load_average_1min']:.1f} at the start; "
        + ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    )
    return lines


def _shares(shares: Mapping[str, float] | None, names: Sequence[str]) -> str:
    return "–" if not shares else " / ".join(f"{shares.get(name, 0.0):.1%}" for name in names)
