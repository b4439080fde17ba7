"""How a request's drafts are verified, and which way suits a request. Pure: nothing here needs torch."""

from __future__ import annotations

import enum


class Mode(enum.IntEnum):
    """How a request's drafts are verified. Modes mix freely in a batch."""

    GREEDY = 0
    REJECTION = 1
    """Standard rejection (Leviathan et al. 2023, arXiv 2211.17192)."""

    BLOCK = 2
    """Block verification (Sun et al. 2024, arXiv 2403.10444)."""

    COUPLED = 3
    """Drafter-invariant (Daliri et al. 2024, arXiv 2408.07978)."""

    @property
    def samples_q(self) -> bool:
        """Verification needs the distribution that the drafter sampled from."""
        return self in (Mode.REJECTION, Mode.BLOCK)


BY_NAME = {"rejection": Mode.REJECTION, "block": Mode.BLOCK, "coupled": Mode.COUPLED}
"""What a deployment or a request may choose. Greedy is not a choice: it is what temperature 0 means."""


def mode_for(*, greedy: bool, seeded: bool, structured: bool, asked: str | None, deployment: str) -> Mode:
    """The mode of one request.

    asked: the request's own choice, None without one; deployment: the configured default.
    A seeded request without a choice is coupled, so that its tokens do not depend on the drafter. A structured one is
    coupled whatever the deployment's default. Raises ValueError when it asks for anything else.
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
    """The scheduler cuts drafts at the first token the grammar forbids, and a cut that depends on the token biases
    rejection and block verification.

    asked: a structured request's own choice. Raises ValueError for one that is not coupled.
    """
    if asked not in (None, "coupled"):
        raise ValueError(f"{asked} verification is not exact under a grammar")
