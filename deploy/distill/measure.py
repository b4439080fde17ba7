"""Measures acceptance without a server: along answers of the target, as rounds of the draft model would run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.actors.learning import draft_models
from outrider.actors.vllm_adapter.offline_answers import TOGETHER
from outrider.cluster.config import ConfigError, EngineConfig
from outrider.cluster.vocabulary import mask_token
from outrider.deploy.bench.machine import machine, versions
from outrider.deploy.distill import models
from outrider.deploy.distill.prompts import PromptFile, spread, tokens_of
from outrider.deploy.distill.rounds import measured
from outrider.deploy.distill.texts import answered, plan
from outrider.deploy.models.check import read_model_json
from outrider.deploy.models.identity import check_made_for

if TYPE_CHECKING:
    import torch

    from outrider.actors.learning.train import Trainer


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
    prompts = spread(data.prompts, limit)
    document = models.check_architecture(target, "TARGET")
    models.check_same_tokens_of(target, drafter)
    check_made_for(target, drafter, every_tensor=True)
    trainer = _loaded(target, drafter, k, dtype, device)
    room = int(document.get("max_position_embeddings") or 1 << 20) - max_tokens
    tokens = tokens_of(prompts, models.load_tokenizer(target), room, chat, "--dataset")
    longest = max(map(len, tokens)) + max_tokens
    engine = models.engine(target, document, dtype, device, longest)
    jobs = plan(len(tokens), set(), 1, TOGETHER, 0)
    texts = [text for _, made in answered(engine, jobs, tokens, max_tokens, 0) for text in made]
    found = measured(trainer, texts, k)
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


def _loaded(target: Path, drafter: Path, k: int, dtype: torch.dtype, device: str) -> Trainer:
    """Loads a drafter of the kind that its config.json tells. Raises ConfigError."""
    from outrider.actors.drafter.mlp_speculator import ARCHITECTURE, MLPSpeculator
    from outrider.actors.learning.train import Trainer
    from outrider.deploy.distill.mlp import MLPTrainer
    from outrider.deploy.distill.one_pass import OnePassTrainer

    document = read_model_json(EngineConfig(model=str(drafter)), "DRAFTER")
    if document.get("architectures") == [ARCHITECTURE]:
        speculator = MLPSpeculator.load(drafter, dtype, device)
        if k > speculator.shape.n_predict or not speculator.shape.tie_weights:
            raise ConfigError(
                f"--k: {drafter} has {speculator.shape.n_predict} heads, and tie_weights is "
                f"{speculator.shape.tie_weights}; at most one draft a head is measured, where heads share their weights"
            )
        return MLPTrainer(draft_models.load(target, dtype, device), speculator, 0.0, dtype)
    model = draft_models.load(drafter, dtype, device)
    if (mask := mask_token(document)) is not None:
        return OnePassTrainer(model, mask, k, 0.0, dtype)
    return Trainer(model, 0.0, dtype)


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
