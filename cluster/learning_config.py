"""``drafter.learn``: a draft model that is trained on the answers it drafts for, while it serves."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from outrider.cluster.config_section import CoreSet, Section

TAUGHT_AT_ONCE = 128
"""Tokens of an answer that are one text to train on, at most."""


class LearningConfig(Section):
    """Training it on the answers it drafts for; [learning.md](learning.md) says what is learned from, and what keeps a
    bad version out."""

    share: float = Field(1.0, gt=0, le=1)
    """Share of the requests that are learned from."""

    when: Literal["always", "idle"] = "always"
    """``idle``: a training step begins only where no drafter has had anything to do for a second, as for a trainer that
    has no cores of its own; a step, or a comparison of versions, that has begun is finished."""

    learning_rate: float = Field(1e-4, gt=0, le=1, allow_inf_nan=False)
    """Of AdamW, after a short rise."""

    batch_size: int = Field(8, ge=1, le=1024)
    """Texts a training step. Half of them are recent, half from everything seen so far."""

    steps_per_version: int = Field(200, ge=1)
    """Training steps after which what was learned is compared with what serves."""

    passes: float = Field(4.0, gt=0, le=1000)
    """How often a text is trained on, on average. When that is reached, the trainer waits for new ones."""

    recent_tokens: int = Field(50_000, ge=1024, le=100_000_000)
    """Tokens of the latest answers that are kept to train on."""

    past_tokens: int = Field(150_000, ge=1024, le=100_000_000)
    """Tokens of a fair sample of all answers so far that are kept beside them, so that what was learned stays."""

    max_text_tokens: int = Field(384, ge=2 * TAUGHT_AT_ONCE, le=32_768)
    """Longest text that is trained on: a part of an answer, and what stands before it."""

    general: str | None = Field(None, min_length=1)
    """Directory of texts by `outrider distill` (OUT/texts), the target's answers: a quarter of a batch is of these, and
    no version serves that has lost on some of them. Without it a drafter forgets what its traffic does not hold."""

    held_out: float = Field(0.125, ge=0.01, le=0.5)
    """Share of the prompts whose answers are never trained on. Versions are compared on these."""

    num_cpus: float = Field(1.0, ge=0)
    """What Ray reserves for the trainer. It works at the lowest priority."""

    num_gpus: float = Field(0.0, ge=0, le=1)
    """GPUs of the trainer's own; 0: it trains on CPU."""

    cores: CoreSet | None = None
    """CPU only: where it trains. None: wherever there is time, on one thread."""

    directory: str | None = Field(None, min_length=1)
    """Where every version that serves is kept, as a checkpoint that ``drafter.model`` takes. None: in memory only."""

    kept_versions: int = Field(3, ge=1, le=1000)
    """How many, the latest: in memory, to go back to, and in ``directory``."""

    @model_validator(mode="after")
    def _one_place(self) -> LearningConfig:
        if self.num_gpus and self.cores is not None:
            raise ValueError("cores: the trainer has a GPU (num_gpus); leave one of the two out")
        return self
