"""What the index remembers of each replica, and in which order it forgets."""

from outrider.actors.serving.routing.policy import PrefixIndex
from outrider.actors.serving.routing.request_profile import token_fingerprint

SYSTEM = list(range(128))
ONE, OTHER = SYSTEM + [1] * 64, SYSTEM + [2] * 64


def index_of(**prompts):
    index = PrefixIndex()
    for replica, ids in prompts.items():
        index.insert(replica, token_fingerprint(ids))
    return index


def test_a_match_counts_tokens_of_whole_blocks():
    index = index_of(a=ONE, b=OTHER, c=list(range(500, 800)))
    assert index.match(token_fingerprint(ONE)) == {"a": 192, "b": 128}
    assert index.match(token_fingerprint(ONE[:100])) == {"a": 96, "b": 96}
    assert index.match(()) == {}


def test_the_least_used_goes_first_and_from_its_end():
    index = index_of(a=ONE)
    index.insert("a", token_fingerprint(OTHER))
    index.set_capacity("a", 192)  # of 256
    assert index.num_tokens("a") == 192
    assert index.match(token_fingerprint(ONE)) == {"a": 128}, "the older ending is gone, the common beginning is not"
    assert index.match(token_fingerprint(OTHER)) == {"a": 192}
    index.set_capacity("a", 160)
    assert index.match(token_fingerprint(OTHER)) == {"a": 160}


def test_use_keeps_a_prefix():
    index = PrefixIndex()
    index.set_capacity("a", 1000)
    index.insert("a", token_fingerprint(ONE))
    for number in range(50):
        assert index.match(token_fingerprint(ONE)) == {"a": 192}
        index.insert("a", token_fingerprint(ONE))
        index.insert("a", token_fingerprint([1000 + number] * 320))
        assert index.num_tokens("a") <= 1000


def test_a_replica_that_is_gone_is_forgotten():
    index = index_of(a=ONE, b=ONE)
    index.forget("a")
    index.forget("never heard of")
    assert index.match(token_fingerprint(ONE)) == {"b": 192}
    assert index.num_tokens("a") == 0
