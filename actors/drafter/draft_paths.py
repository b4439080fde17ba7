"""Builds the further paths of a draft tree from one pass of the draft model. Imports neither vLLM, Ray nor torch.

A pass draws each position without knowing what was drawn before it. So a path that has another likely token at one
position goes on as the main line does. Paths differ in the first position at which they leave the main line, or in the
token there: their outcomes exclude each other, and the tokens that they are expected to bring add up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.actors.drafter.outcomes import OutcomeModel
from outrider.cluster.link.messages import DraftPath

if TYPE_CHECKING:
    from outrider.actors.drafter.model_sequence import DraftChain


def draft_paths(main: DraftChain, base: int, count: int, outcomes: OutcomeModel) -> tuple[DraftPath, ...]:
    """Returns the paths beside a main line's first `count` drafts, those that bring most for their rows first.

    A path brings the probability of its outcome times the tokens that follow, at the rate at which drafts are accepted.

    Args:
        base: position of the first draft.
    """
    found: list[DraftPath] = []
    ids, keep, reach = main.ids(base, base + count), outcomes.usual_acceptance, 1.0
    for index in range(count):
        drawn = main.at(base + index)
        if drawn is None:  # a look-up's
            continue
        for outcome in outcomes.outcomes(reach, base + index, drawn):
            gain = outcome.value * (1 - keep ** (count - index)) / (1 - keep)
            found.append(DraftPath([*ids[:index], outcome.token, *ids[index + 1 :]], gain))
        reach *= outcomes.acceptance(drawn)
    return tuple(sorted(found, key=lambda path: -path.gain))
