"""The cut draft vocabulary against a slow one that follows its rules word for word, over random sequences of calls."""

import random

import pytest

from outrider.actors.drafter import vocabulary as draft_vocabulary
from outrider.actors.drafter.vocabulary import VOCABULARY_FILE, DraftVocabulary, trained_on


class SlowVocabulary:
    """Looks at every slot for every replacement."""

    def __init__(self, vocab_size, num_slots, always, half_life_tokens):
        others = [token for token in range(vocab_size) if token not in always]
        self.tokens = sorted([*always, *others[: num_slots - len(always)]])
        self.weights = dict.fromkeys(self.tokens, 0.0)
        self.always, self.growth = always, 2.0 ** (1.0 / half_life_tokens)
        self.use = 1.0
        self.pinned = {}
        self.waiting = []

    def is_pinned(self, token):
        return any(token in tokens for tokens in self.pinned.values())

    def pin(self, key, token_ids):
        self.unpin(key)
        self.pinned[key] = list(dict.fromkeys(token_ids))
        for token in self.pinned[key]:
            if token in self.tokens:
                self.weights[token] += self.use
            elif token not in self.waiting and not self.take_in(token):
                self.waiting.append(token)

    def unpin(self, key):
        self.pinned.pop(key, None)
        self.waiting = [token for token in self.waiting if self.is_pinned(token)]
        while self.waiting and self.take_in(self.waiting[0]):
            self.waiting.pop(0)

    def observe(self, token_ids):
        for token in token_ids:
            self.use *= self.growth
            if token in self.tokens:
                self.weights[token] += self.use
            else:
                self.take_in(token)

    def take_in(self, token):
        may_go = [t for t in self.tokens if t not in self.always and not self.is_pinned(t)]
        if not may_go:
            return False
        victim = min(may_go, key=lambda t: (self.weights[t], -t))
        self.tokens[self.tokens.index(victim)] = token
        self.weights[token] = self.use
        return True


def check(vocabulary, always, pinned):
    tokens = vocabulary.token_ids
    assert len(tokens) == len(vocabulary) == vocabulary.num_slots
    assert len(set(tokens)) == len(tokens), "one id in two slots"
    assert all(0 <= token < vocabulary.vocab_size and token in vocabulary for token in tokens)
    assert set(always) <= set(tokens)
    wanted = {token for held in pinned.values() for token in held} | set(always)
    assert len(wanted & set(tokens)) == min(len(wanted), len(tokens)), "room left for a pinned id"


@pytest.mark.parametrize("seed", range(30))
def test_random_calls(seed, monkeypatch):
    rng = random.Random(seed)
    vocab_size = rng.choice([8, 40, 200])
    num_slots = rng.randint(1, vocab_size)
    always = frozenset(rng.sample(range(vocab_size), rng.randint(0, min(3, num_slots))))
    half_life = rng.choice([1, 5, 64])
    if seed % 3:
        monkeypatch.setattr(draft_vocabulary, "_RESCALE_AT", 2.0**3)
    fast = DraftVocabulary(vocab_size, num_slots, always, half_life)
    slow = SlowVocabulary(vocab_size, num_slots, always, half_life)
    slots = fast.token_ids
    assert slots == slow.tokens
    for _ in range(120):
        ids = [min(int(rng.expovariate(6 / vocab_size)), vocab_size - 1) for _ in range(rng.randint(1, 12))]
        call = rng.random()
        if call < 0.5:
            fast.observe(ids)
            slow.observe(ids)
        elif call < 0.8:
            key = rng.randint(0, 4)
            fast.pin(key, ids)
            slow.pin(key, ids)
        else:
            key = rng.randint(0, 4)
            fast.unpin(key)
            slow.unpin(key)
        check(fast, always, slow.pinned)
        assert fast.token_ids == slow.tokens
        if rng.random() < 0.3:
            changes = fast.take_changes()
            assert len({slot for slot, _ in changes}) == len(changes)
            for slot, token in changes:
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
    vocabulary.pin("a", [70, 5, 80])
    vocabulary.observe([60, 61])
    vocabulary.take_changes()
    vocabulary.limit(50)
    assert len(vocabulary.token_ids) == 6
    assert max(vocabulary.token_ids) < 50
    assert {2, 5} <= set(vocabulary.token_ids)
    changed = vocabulary.take_changes()
    assert {token for _, token in changed} <= set(vocabulary.token_ids)
    assert all(vocabulary.token_ids[slot] == token for slot, token in changed)
    vocabulary.observe([60, 44])
    vocabulary.pin("b", [99, 43])
    assert {43, 44} <= set(vocabulary.token_ids)
    assert max(vocabulary.token_ids) < 50
    vocabulary.unpin("a")
    vocabulary.unpin("b")
    vocabulary.limit(80)
    assert vocabulary.vocab_size == 50, "it only goes down"


def test_more_slots_than_a_target_has_tokens_is_an_error_that_changes_nothing():
    vocabulary = DraftVocabulary(100, 40)
    before = vocabulary.token_ids
    with pytest.raises(ValueError, match="40 slots, and only 39 tokens to fill them"):
        vocabulary.limit(39)
    assert (vocabulary.token_ids, vocabulary.vocab_size) == (before, 100)
