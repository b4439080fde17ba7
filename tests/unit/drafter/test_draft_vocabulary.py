"""The cut draft vocabulary, against a slow one over random sequences of calls."""

import random

import pytest

from outrider.actors.drafter.vocabulary import VOCABULARY_FILE, DraftVocabulary, trained_on


class SlowVocabulary:
    """Looks at every slot for every replacement."""

    def __init__(self, vocab_size, num_slots, always):
        others = [token for token in range(vocab_size) if token not in always]
        self.tokens = sorted([*always, *others[: num_slots - len(always)]])
        self.last_use = {token: -token for token in range(vocab_size)}
        self.always, self.uses = always, 0

    def use(self, token_ids):
        for token in token_ids:
            may_go = [t for t in self.tokens if t not in self.always]
            if token not in self.tokens and not may_go:
                continue
            self.uses += 1
            self.last_use[token] = self.uses
            if token not in self.tokens:
                victim = min(may_go, key=self.last_use.__getitem__)
                self.tokens[self.tokens.index(victim)] = token


@pytest.mark.parametrize("seed", range(30))
def test_the_least_recently_used_token_leaves_for_one_that_is_missing(seed):
    rng = random.Random(seed)
    vocab_size = rng.choice([8, 40, 200])
    num_slots = rng.randint(1, vocab_size)
    always = frozenset(rng.sample(range(vocab_size), rng.randint(0, min(3, num_slots))))
    fast = DraftVocabulary(vocab_size, num_slots, always)
    slow = SlowVocabulary(vocab_size, num_slots, always)
    slots = fast.token_ids
    assert slots == slow.tokens
    for _ in range(120):
        ids = [min(int(rng.expovariate(6 / vocab_size)), vocab_size - 1) for _ in range(rng.randint(1, 12))]
        (fast.observe if rng.random() < 0.5 else fast.use)(ids)
        slow.use(ids)
        assert fast.token_ids == slow.tokens
        if rng.random() < 0.3:
            for slot, token in fast.take_changes():
                slots[slot] = token
            assert slots == fast.token_ids, "the owner of the head would hold other rows"
            assert fast.take_changes() == []


def test_what_it_was_trained_on_goes_before_the_lowest_ids():
    assert DraftVocabulary(100, 6, always=[99, 50], at_first=[70, 50, 40]).token_ids == [0, 1, 40, 50, 70, 99]
    assert DraftVocabulary(100, 3, always=[99], at_first=[70, 60, 50]).token_ids == [60, 70, 99], "the first find room"
    assert DraftVocabulary(60, 3, at_first=[70, 50]).token_ids == [0, 1, 50], "an id that there is not"


def test_a_checkpoint_says_what_it_was_trained_on(tmp_path):
    assert trained_on(str(tmp_path)) == trained_on("a/hub-id") == []
    file = tmp_path / VOCABULARY_FILE
    file.write_text("[5, 3]")
    assert trained_on(str(tmp_path)) == [5, 3]
    for text in ("[5, 5]", "[-1]", "[true]", '{"a": 1}', "[1"):
        file.write_text(text)
        with pytest.raises(ValueError, match=r"draft_vocabulary\.json is"):
            trained_on(str(tmp_path))


def test_a_committed_token_takes_the_place_of_the_highest_unused_id():
    vocabulary = DraftVocabulary(100, 4, always=[99])
    vocabulary.observe([2, 50])
    assert vocabulary.take_changes() == [(1, 50)]
    assert vocabulary.token_ids == [0, 50, 2, 99]
    assert (vocabulary.num_observed, vocabulary.num_missed) == (2, 1)


def test_a_smaller_target_s_tokens_alone_stay():
    vocabulary = DraftVocabulary(100, 6, always=[2, 90])
    vocabulary.use([70, 5, 80])
    vocabulary.take_changes()
    vocabulary.limit(50)
    assert sorted(vocabulary.token_ids) == [0, 1, 2, 3, 4, 5]
    assert all(vocabulary.token_ids[slot] == token for slot, token in vocabulary.take_changes())
    vocabulary.observe([60, 44])
    assert sorted(vocabulary.token_ids) == [0, 1, 2, 3, 5, 44]
    vocabulary.limit(80)
    assert vocabulary.vocab_size == 50, "it only goes down"


def test_more_slots_than_a_target_has_tokens_is_an_error_that_changes_nothing():
    vocabulary = DraftVocabulary(100, 40)
    before = vocabulary.token_ids
    with pytest.raises(ValueError, match="40 slots, and only 39 tokens to fill them"):
        vocabulary.limit(39)
    assert (vocabulary.token_ids, vocabulary.vocab_size) == (before, 100)
