"""A drafter's sequence: what a commit keeps of the drafts' KV."""

import pytest

from actors.drafting.sequence import DraftSequence
from actors.drafting.strategy import UnknownSequence

KEY = (1, 7)


@pytest.fixture
def drafted():
    """Ten committed tokens, all fed, and four drafts after them: KV of the first three drafts is there too."""
    sequence = DraftSequence(KEY, list(range(10)), 4, num_computed=0)
    sequence.drafted([20, 21, 22, 23])
    return sequence


def test_a_new_sequence_is_all_uncomputed():
    sequence = DraftSequence(KEY, [1, 2, 3], 4)
    assert (sequence.committed_len, sequence.num_uncomputed) == (3, 3)


def test_drafting_again_without_a_commit_feeds_the_last_token_again(drafted):
    assert drafted.num_uncomputed == 1


@pytest.mark.parametrize(
    ("committed", "computed"),
    [
        ([99], 10),  # nothing accepted: KV of the ten committed tokens is valid, the new one is to be fed
        ([20, 99], 11),  # one accepted
        ([20, 21, 22, 99], 13),  # three accepted: KV of all three is there
        ([20, 21, 22, 23, 99], 13),  # all accepted: the last draft was never fed
        ([20, 21], 11),  # accepted without a token of the target's own after it: the last one is fed again
        ([20], 10),
        ([99, 21, 22], 10),  # agreement after a difference is none
    ],
)
def test_a_commit_keeps_the_kv_of_accepted_drafts_only(drafted, committed, computed):
    drafted.commit(10, committed)
    assert drafted.num_computed == computed
    assert drafted.token_ids == [*range(10), *committed]
    assert drafted.num_uncomputed >= 1, "the last token is always fed: its logits make the next draft"
    assert drafted.drafts == []


def test_commits_without_drafts_in_between_only_append(drafted):
    drafted.commit(10, [20, 99])
    drafted.commit(12, [98, 97])
    assert drafted.num_computed == 11
    assert drafted.num_uncomputed == 3


@pytest.mark.parametrize("base", [0, 9, 11])
def test_a_commit_at_another_length_is_refused_and_changes_nothing(drafted, base):
    with pytest.raises(UnknownSequence):
        drafted.commit(base, [20])
    assert drafted.token_ids == list(range(10))
    assert drafted.drafts == [20, 21, 22, 23]
