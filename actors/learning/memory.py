"""The memory that training a draft model takes, told by its checkpoint's headers before anything is loaded."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from outrider.cluster.config_section import ConfigError

TRAINED_BYTES = 20
"""Of a trained parameter, in float32: its weight, its gradient, two moments of AdamW, and a copy of the weight while
versions are compared."""

_FROZEN = ("model.embed_tokens.", "lm_head.")
"""Of the architectures that are trained: see draft_models.freeze."""


@dataclass(frozen=True)
class ParameterCounts:
    trained: int
    frozen: int

    @staticmethod
    def of(checkpoint: Path) -> ParameterCounts:
        """Reads the headers of its safetensors files."""
        from safetensors import safe_open

        counts = {True: 0, False: 0}
        for file in checkpoint.glob("*.safetensors"):
            with safe_open(file, "np") as opened:
                for name in opened.keys():  # noqa: SIM118 - it is no mapping
                    counts[not name.startswith(_FROZEN)] += math.prod(opened.get_slice(name).get_shape())
        return ParameterCounts(counts[True], counts[False])


def check_fits(counts: ParameterCounts, frozen_bytes: int, available: int, where: str) -> None:
    """Raises ConfigError where training takes more than the bytes that are available, activations not counted.

    frozen_bytes: of a parameter that is not trained. where: whose memory it is, for the message.
    """
    needed = TRAINED_BYTES * counts.trained + frozen_bytes * counts.frozen
    if needed > available:
        raise ConfigError(
            f"drafter.learn: training drafter.model takes {needed / 1e9:.1f} GB and activations, {where} has "
            f"{available / 1e9:.1f} GB: {counts.trained / 1e6:,.0f} million trained parameters of {TRAINED_BYTES} "
            "bytes (float32 weights, gradients, two moments of AdamW, a copy of the weights), "
            f"{counts.frozen / 1e6:,.0f} million others of {frozen_bytes} bytes; give a smaller drafter, give the "
            "trainer more memory, or leave learn out"
        )
