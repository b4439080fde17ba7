"""Chooses how the drafts of a request are verified. Pure, without torch."""

from __future__ import annotations

import enum

MAX_PATHS = 16
"""Most paths of a request's draft tree that a step may verify, the main line included."""


class Mode(enum.IntEnum):
    """Names a way to verify drafts. Modes mix freely in a batch."""

    GREEDY = 0
    REJECTION = 1
    """Standard rejection (Leviathan et al. 2023, arXiv 2211.17192)."""

    BLOCK = 2
    """Block verification (Sun et al. 2024, arXiv 2403.10444)."""

    COUPLED = 3
    """Drafter-invariant (Daliri et al. 2024, arXiv 2408.07978)."""

    @property
    def samples_q(self) -> bool:
        """Whether verification needs the distribution that the drafter sampled from."""
        return self in (Mode.REJECTION, Mode.BLOCK)


BY_NAME = {"rejection": Mode.REJECTION, "block": Mode.BLOCK, "coupled": Mode.COUPLED}
"""Modes that a deployment or a request may choose. Temperature 0 is greedy in any case."""


def mode_for(*, greedy: bool, seeded: bool, structured: bool, asked: str | None, deployment: str) -> Mode:
    """Returns the mode of one request.

    A greedy request is GREEDY whatever it asks for. Of the others, a structured one is always coupled, and so is a
    seeded one without a choice, so that its tokens do not depend on the drafter.

    Args:
        asked: The request's own choice; None without one.
        deployment: The configured default.

    Raises:
        ValueError: A structured request that is not greedy asks for another mode.
    """
    if greedy:
        return Mode.GREEDY
    if structured:
        check_exact_under_grammar(asked)
        return Mode.COUPLED
    if asked is not None:
        return BY_NAME[asked]
    return Mode.COUPLED if seeded else BY_NAME[deployment]


def check_exact_under_grammar(asked: str | None) -> None:
    """Raises ValueError if the mode that a structured request asks for is not coupled.

    The scheduler cuts drafts at the first token that the grammar forbids. A cut that depends on the token biases
    rejection and block verification.
    """
    if asked not in (None, "coupled"):
        raise ValueError(f"{asked} verification is not exact under a grammar")
