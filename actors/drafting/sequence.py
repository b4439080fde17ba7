"""One sequence in the drafter: committed tokens, and how much of their KV is valid. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from actors.drafting.strategy import SequenceKey, UnknownSequence


@dataclass(slots=True)
class DraftSequence:
    key: SequenceKey
    token_ids: list[int]
    num_speculative_tokens: int
    num_computed: int = 0
    """Leading committed tokens whose KV entries are valid."""

    drafts: list[int] = field(default_factory=list)
    """What was drafted last, continuing token_ids. KV of all but the last of them is valid."""

    @property
    def committed_len(self) -> int:
        return len(self.token_ids)

    @property
    def num_uncomputed(self) -> int:
        """Committed tokens the next step must feed: at least the last one, whose logits draft the next."""
        return len(self.token_ids) - self.num_computed

    def drafted(self, token_ids: list[int]) -> None:
        """Note what was drafted after all committed tokens were fed."""
        # Without a commit in between, drafting again feeds the last token again.
        self.num_computed = len(self.token_ids) - 1
        self.drafts = token_ids

    def commit(self, base_committed_len: int, token_ids: Sequence[int]) -> None:
        """Append committed tokens and roll the KV back to where drafts and commit agree.

        Raises UnknownSequence when base_committed_len is not this sequence's length.
        """
        if base_committed_len != len(self.token_ids):
            raise UnknownSequence(self.key)
        if self.drafts:
            accepted = _common_prefix(self.drafts, token_ids)
            # The last committed token is always fed again: its logits are what the next draft comes from.
            self.num_computed = len(self.token_ids) + min(accepted, len(self.drafts) - 1, len(token_ids) - 1)
        self.token_ids.extend(token_ids)
        self.drafts = []


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    count = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        count += 1
    return count
