"""Where the drafts of an answer come from."""

import enum


class Origin(enum.IntEnum):
    NONE = 0
    """No answer in time, or one without drafts for another reason than its length."""

    MAIN_LINE = 1
    """Drafted ahead: every draft was accepted and the bonus token was the one guessed."""

    SIDE_BRANCH = 2
    """Drafted ahead for another outcome than the main line's."""

    MISS = 3
    """Nobody had foreseen the outcome: drafted while the target waited, or not at all."""

    @property
    def is_hit(self) -> bool:
        return self in (Origin.MAIN_LINE, Origin.SIDE_BRANCH)
