"""One picture of a report: tokens per second chunk by chunk, and where a round's time went."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from outrider.cluster.config import ConfigError

COLOURS = {"ours": "#1f6f8b", "other": "#d9822b"}
PARTS = {"target": "#1f6f8b", "waiting for drafts": "#c0392b", "rest": "#b8b8b8"}


def check_plot(path: Path) -> None:
    """Raise ConfigError, before the run, for what would keep its picture from being drawn."""
    if path.suffix != ".png":
        raise ConfigError(f"--plot: {path} is not called *.png; call it so")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "--plot: matplotlib is not installed; run: pip install 'outrider[bench]', or leave --plot out"
        )


def round_parts(times: dict[str, float]) -> dict[str, float]:
    """Milliseconds of a median round by part, which stack up to its period. Drafting is no part of it: a draft runs
    beside the target, or inside the waiting."""
    target, wait = times["target_ms"], times["wait_ms"]
    return {"target": target, "waiting for drafts": wait, "rest": max(times["period_ms"] - target - wait, 0.0)}


def draw(report: dict[str, Any], path: Path) -> None:
    """Write the picture."""
    from matplotlib.figure import Figure  # not pyplot, which looks for a screen

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_chunks(left, report)
    _draw_rounds(right, report)
    load, machine = report["load"], report["machine"]
    figure.suptitle(
        f"{report['ours']['settings']['name']}: concurrency {load['concurrency']}, temperature "
        f"{load['temperature']:g}, {load['max_tokens']} tokens, {Path(report['dataset']['path']).name}\n"
        f"{machine['cpu']}{''.join(', ' + name for name in machine['accelerators'][:1])}, {report['ended'][:10]}",
        fontsize=10,
    )
    figure.savefig(path, dpi=150)


def _draw_chunks(axes: Any, report: dict[str, Any]) -> None:
    for side in ("ours", "other"):
        if side not in report:
            continue
        rows = [row for row in report["chunks"] if row["side"] == side]
        speeds = [row["output_tok_per_s"] for row in rows]
        total = report[side]["output_tok_per_s"]
        label = f"{report[side]['settings']['name']}: {total:.1f} tok/s in all"
        axes.plot([row["pair"] + 1 for row in rows], speeds, "o-", color=COLOURS[side], label=label)
    title = "Output tokens per second"
    if report["ratio"] is not None:
        spread = report["ratio_spread"]
        title += f"; ours / other {report['ratio']:.2f} ({spread['min']:.2f} to {spread['max']:.2f})"
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("chunk")
    axes.set_ylabel("tok/s")
    axes.set_ylim(bottom=0)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize=9)


def _draw_rounds(axes: Any, report: dict[str, Any]) -> None:
    bars: list[str] = []
    if times := report["ours"]["round_time"]:
        bottom = 0.0
        for part, value in round_parts(times).items():
            axes.bar(len(bars), value, 0.6, bottom=bottom, color=PARTS[part], label=f"{part} {value:.1f} ms")
            bottom += value
        bars.append("our round")
        drafting = f"drafter's work {times['draft_ms']:.1f} ms"
        axes.bar(len(bars), times["draft_ms"], 0.6, color="#7a9e3d", label=drafting)
        bars.append("drafter,\nbeside it")
    for side in ("ours", "other"):
        if side in report and (gap := report[side]["message_gap_ms"]["p50"]) is not None:
            axes.bar(
                len(bars), gap, 0.6, color=COLOURS[side], alpha=0.45, label=f"{side}, between messages {gap:.1f} ms"
            )
            bars.append(f"{side},\nas received")
    axes.set_xticks(range(len(bars)), bars, fontsize=9)
    axes.set_ylabel("ms, medians")
    axes.set_title("Where a round's time went", fontsize=10)
    axes.set_ylim(top=axes.get_ylim()[1] * 1.45)
    if bars:
        axes.legend(fontsize=8, loc="upper right")
