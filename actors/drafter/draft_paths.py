"""Builds the further paths of a draft tree from what has been drafted beside the main line. Pure.

A path leaves the main line at one position, with another token that the draft model found likely there. Where a side
branch for that token has been drafted, the path goes on as it does. A model that drafts in one pass has drawn the
positions after it without knowing that token, so that they serve both; otherwise the path ends there.

Paths of one main line cover outcomes that exclude each other, so the tokens that they are expected to bring add up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.cluster.link.messages import DraftPath

if TYPE_CHECKING:
    from outrider.actors.drafter.model_sequence import ModelSequence
    from outrider.actors.drafter.outcomes import OutcomeModel


def draft_paths(sequence: ModelSequence, count: int, outcomes: OutcomeModel) -> tuple[DraftPath, ...]:
    """Returns the further paths beside the main line's first `count` drafts, those with the best rows first.

    A path is worth the probability of its outcome times the tokens that follow if it is the right one, by the rate at
    which drafts are accepted.
    """
    base, main, keep = sequence.committed_len, sequence.main, outcomes.usual_acceptance
    end = base + max(count, min(sequence.num_wanted, sequence.max_len - base))
    found: list[DraftPath] = []
    reach = 1.0
    for position in range(base, base + count):
        drawn = main.at(position)
        if drawn is None:  # a look-up's
            continue
        for outcome in outcomes.outcomes(reach, position, drawn):
            side = sequence.sides.get((position, outcome.token))
            branch = [outcome.token]
            if side is not None and len(side.chain.tokens) > 1:
                branch = side.chain.ids(position, end)
            elif sequence.one_pass:
                branch += main.ids(position + 1, base + count)
            gain = outcome.value * (1 - keep ** len(branch)) / (1 - keep)
            found.append(DraftPath([*main.ids(base, position), *branch], gain))
        reach *= outcomes.acceptance(drawn)
    found.sort(key=lambda path: -path.gain / (1 + len(path.token_ids)))
    return tuple(found[: sequence.num_paths - 1])
