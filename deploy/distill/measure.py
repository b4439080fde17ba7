"""Measures acceptance without a server: along answers of the target, as rounds of the draft model would run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.actors.learning import draft_models
from outrider.actors.vllm_adapter.offline_answers import TOGETHER
from outrider.deploy.bench.machine import machine, versions
from outrider.deploy.distill import models
from outrider.deploy.distill.prompts import PromptFile, spread, tokens_of
from outrider.deploy.distill.rounds import measured
from outrider.deploy.distill.texts import answered, plan
from outrider.deploy.models.identity import check_made_for

if TYPE_CHECKING:
    import torch


def measure(
    *,
    target: Path,
    drafter: Path,
    data: PromptFile,
    limit: int | None,
    chat: bool,
    k: int,
    max_tokens: int,
    device: str,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Returns the report over greedy answers. Raises ConfigError.

    Args:
        limit: Number of prompts, evenly spread over the file. None: all.
    """
    from outrider.actors.learning.train import Trainer

    prompts = spread(data.prompts, limit)
    document = models.check_architecture(target, "TARGET")
    models.check_same_tokens_of(target, drafter)
    check_made_for(target, drafter, every_tensor=True)
    room = int(document.get("max_position_embeddings") or 1 << 20) - max_tokens
    tokens = tokens_of(prompts, models.load_tokenizer(target), room, chat, "--dataset")
    longest = max(map(len, tokens)) + max_tokens
    engine = models.engine(target, document, dtype, device, longest)
    jobs = plan(len(tokens), set(), 1, TOGETHER, 0)
    texts = [text for _, made in answered(engine, jobs, tokens, max_tokens, 0) for text in made]
    found = measured(Trainer(draft_models.load(drafter, dtype, device), 0.0, dtype), texts, k)
    return {
        "acceptance_rate": found.tallies[-1].acceptance_rate,
        "by_position": found.tallies[-1].by_position,
        "overlap": found.overlap,
        "by_k": [
            {"k": tally.k, "tokens_per_round": tally.tokens_per_round, "acceptance_rate": tally.acceptance_rate}
            for tally in found.tallies
        ],
        "k": k,
        "target": str(target),
        "drafter": str(drafter),
        "dataset": {"path": str(data.path), "sha256": data.sha256, "prompts": len(prompts)},
        "tokens": found.tokens,
        "max_tokens": max_tokens,
        "dtype": str(dtype).removeprefix("torch."),
        "machine": machine(()),
        "versions": versions(),
    }


def table(report: dict[str, Any]) -> str:
    """Returns the report as text."""
    positions = ", ".join("-" if share is None else f"{share:.3f}" for share in report["by_position"])
    rows = [
        f"  K = {row['k']}: {row['tokens_per_round']:.2f} tokens a round, {row['acceptance_rate']:.3f} accepted"
        for row in report["by_k"]
    ]
    summary = (
        f"{report['dataset']['prompts']} greedy answers, {report['tokens']} tokens; by position {positions}; drawn at "
        f"temperature 1, a single draft is accepted with probability {report['overlap']:.3f}"
    )
    return "\n".join([summary, *rows])
