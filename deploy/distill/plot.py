"""Pictures: a training's course, and acceptance by position."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

OURS, OTHER = "#1f6f8b", "#d9822b"


def can_draw() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def draw_course(rows: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """rows: of progress.jsonl."""
    from matplotlib.figure import Figure  # not pyplot, which looks for a screen

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    minutes = [row["minutes"] for row in rows]
    losses = [(row["minutes"], row["loss"]) for row in rows if row["loss"] is not None]
    left.plot(*zip(*losses, strict=True) if losses else ([], []), "-", color=OURS)
    left.set_title("Loss on training texts", fontsize=10)
    for position in range(len(rows[0]["by_position"])):
        right.plot(
            minutes, [row["by_position"][position] for row in rows], "-", alpha=0.5, label=f"draft {position + 1}"
        )
    right.plot(minutes, [row["acceptance_rate"] for row in rows], "o-", color=OURS, ms=3, label="of all drafts")
    right.set_title("Acceptance on held-out answers, greedy, K = 3", fontsize=10)
    right.set_ylim(0, 1)
    right.legend(fontsize=8)
    for axes in (left, right):
        axes.set_xlabel("minutes, generating text included")
        axes.grid(alpha=0.3)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=120)


def draw_acceptance(report: dict[str, Any], path: Path) -> None:
    """report: of `outrider acceptance`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for mode, found in report["modes"].items():
        positions = range(1, len(found["by_position"]) + 1)
        left.plot(positions, [share or 0.0 for share in found["by_position"]], "o-", label=mode)
        right.plot(
            [row["k"] for row in found["by_k"]], [row["tokens_per_round"] for row in found["by_k"]], "o-", label=mode
        )
    for mode, found in report["together"].items():
        rows = found["by_k"]
        right.plot(
            [row["k"] for row in rows], [row["tokens_per_round"] for row in rows], "s--", label=f"{mode}, beside"
        )
    left.set_title("Accepted, of the drafts decided on", fontsize=10)
    left.set_xlabel("position in the round")
    left.set_ylim(0, 1)
    right.set_title("Expected tokens a round", fontsize=10)
    right.set_xlabel("drafts a round (K)")
    right.set_ylim(bottom=1)
    for axes in (left, right):
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    drafter = report["drafter"]
    figure.suptitle(
        f"{Path(report['target']).name}, drafter {drafter['method']} {Path(drafter.get('model') or '').name}: "
        f"{report['tokens']} tokens of {report['answers']} answers, {Path(report['dataset']['path']).name}",
        fontsize=10,
    )
    figure.savefig(path, dpi=120)
