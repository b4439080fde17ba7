"""Acceptance without a server: the target answers prompts, and a draft model's rounds are walked along its answers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.actors.learning import draft_models
from outrider.actors.vllm_seam.offline_answers import TOGETHER
from outrider.deploy.bench.machine import machine, versions
from outrider.deploy.distill import models
from outrider.deploy.distill.prompts import PromptFile, spread, tokens_of
from outrider.deploy.distill.rounds import measured
from outrider.deploy.distill.texts import answered, plan
from outrider.deploy.models.identity import check_made_for

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Settings:
    target: Path
    drafter: Path
    data: PromptFile
    limit: int | None
    """Prompts, evenly spread; None: all."""

    chat: bool
    k: int
    max_tokens: int
    device: str
    dtype: torch.dtype


def measure(settings: Settings) -> dict[str, Any]:
    """The report, of greedy answers. Raises ConfigError."""
    from outrider.actors.learning.train import Trainer

    prompts = spread(settings.data.prompts, settings.limit)
    document = models.check_architecture(settings.target, "TARGET")
    models.check_same_words(settings.target, settings.drafter)
    check_made_for(settings.target, settings.drafter, every_tensor=True)
    room = int(document.get("max_position_embeddings") or 1 << 20) - settings.max_tokens
    tokens = tokens_of(prompts, models.load_tokenizer(settings.target), room, settings.chat, "--dataset")
    longest = max(map(len, tokens)) + settings.max_tokens
    engine = models.engine(settings.target, document, settings.dtype, settings.device, longest)
    jobs = plan(len(tokens), set(), 1, TOGETHER, 0)
    texts = [text for _, made in answered(engine, jobs, tokens, settings.max_tokens, 0) for text in made]
    drafter = draft_models.load(settings.drafter, settings.dtype, settings.device)
    found = measured(Trainer(drafter, 0.0, settings.dtype), texts, settings.k)
    return {
        "acceptance_rate": found.tallies[-1].acceptance_rate,
        "by_position": found.tallies[-1].by_position,
        "overlap": found.overlap,
        "by_k": [
            {"k": tally.k, "tokens_per_round": tally.tokens_per_round, "acceptance_rate": tally.acceptance_rate}
            for tally in found.tallies
        ],
        "k": settings.k,
        "target": str(settings.target),
        "drafter": str(settings.drafter),
        "dataset": {"path": str(settings.data.path), "sha256": settings.data.sha256, "prompts": len(prompts)},
        "tokens": found.tokens,
        "max_tokens": settings.max_tokens,
        "dtype": str(settings.dtype).removeprefix("torch."),
        "machine": machine(()),
        "versions": versions(),
    }


def table(report: dict[str, Any]) -> str:
    """For people."""
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
