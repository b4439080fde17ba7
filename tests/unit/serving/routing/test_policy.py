"""Which replica gets which request, and what its cache is taken to hold: simulated traffic, no cluster."""

import itertools
import random
from collections import Counter

from outrider.actors.serving.routing.policy import SUSPECT_S, PrefixIndex, RoutingPolicy, RoutingSettings
from outrider.actors.serving.routing.request_profile import RoutedRequest, token_fingerprint

REPLICAS = ["a", "b", "c", "d"]


def make(num_replicas=2, clock=lambda: 0.0, **settings):
    policy = RoutingPolicy(RoutingSettings(**{"max_ongoing_requests": 64, **settings}), clock)
    policy.update({replica: {} for replica in REPLICAS[:num_replicas]})
    return policy


def prompt(topic, tokens=512, answer_tokens=64, **fields):
    """topic: what the first half of the prompt is about; the rest is the request's own."""
    own = next(prompt.numbers)
    ids = [topic] * (tokens // 2) + [10_000 + own] * (tokens - tokens // 2)
    return RoutedRequest(token_fingerprint(ids), tokens, answer_tokens, **fields)


prompt.numbers = itertools.count()


def send(policy, request, key=None, replicas=("a", "b")):
    replica = policy.rank(request, replicas)[0]
    policy.assign(request, replica, key or str(next(prompt.numbers)))
    return replica


def test_requests_with_a_common_beginning_stay_together():
    policy = make(4)
    homes = {}
    for _ in range(50):
        for topic in range(12):
            replica = send(policy, prompt(topic), key="k", replicas=REPLICAS)
            assert homes.setdefault(topic, replica) == replica
            policy.release(replica, "k")
            assert send(make(4, seed=7), prompt(topic), replicas=REPLICAS) == replica, "another router agrees"
    assert len(set(homes.values())) == 4, "and not all in one place"


def test_a_popular_prefix_yields_to_load():
    """Everything at once, nothing ends: the home fills until what it has cached no longer outweighs its load."""
    policy = make(4, max_imbalance_tokens=20_000)
    choices = [send(policy, prompt(1), replicas=REPLICAS) for _ in range(200)]
    # What 256 cached tokens outweigh: 2048 tokens, that is between 3 and 4 requests of 576.
    assert len(set(choices[:4])) == 1
    assert set(choices) == set(REPLICAS)
    tokens = [policy.load.tokens(replica) for replica in REPLICAS]
    assert max(tokens) - min(tokens) <= 20_000 + 576


def test_beyond_the_bound_a_replica_gets_nothing():
    policy = make(2, prefix_affinity=1e9, max_imbalance_tokens=5000)
    home = send(policy, prompt(1))
    while send(policy, prompt(1)) == home:
        assert policy.load.tokens(home) <= 5000 + 2 * 576
    assert policy.load.tokens(home) > 5000


def test_when_all_candidates_are_overloaded_the_least_loaded_replica_is_chosen():
    """The two that a prompt's hash makes candidates have too much to do; one of the others has less than the other."""
    policy, request = make(4, max_imbalance_tokens=5000), prompt(1)
    first, second, busy, idle = make(4).rank(request, REPLICAS)  # equal loads: in the order of the hash
    for replica, tokens in ((first, 20_000), (second, 30_000), (busy, 4000), (idle, 1000)):
        policy.assign(RoutedRequest((), tokens, 0), replica, "work")
    assert policy.rank(request, REPLICAS)[0] == idle


def test_without_affinity_load_alone_decides():
    policy = make(2, prefix_affinity=0.0)
    counts = Counter(send(policy, prompt(1)) for _ in range(40))
    assert counts == {"a": 20, "b": 20}


def test_the_same_traffic_and_seed_give_the_same_choices():
    def choices(seed):
        policy, dice = make(4, seed=seed), random.Random(3)
        return [send(policy, RoutedRequest((), dice.randrange(1, 500), 10), replicas=REPLICAS) for _ in range(100)]

    assert choices(1) == choices(1) != choices(2)


def test_a_replica_without_its_drafter_costs_those_who_want_drafts():
    policy = make(2)
    policy.update({"a": {"speculation_up": False}, "b": {"speculation_up": True}})
    wants = RoutedRequest((), 10, 100, wants_drafts=True)
    assert all(policy.rank(wants, ["a", "b"])[0] == "b" for _ in range(20))
    # It is not excluded: with enough to do at the other one it is the better choice.
    policy.assign(RoutedRequest((), 5000, 0), "b", "busy")
    assert policy.rank(wants, ["a", "b"]) == ["a", "b"]
    policy.update({"a": {"speculation_up": False}, "b": {}})
    policy.release("b", "busy")
    policy.assign(RoutedRequest((), 50, 0), "b", "some")
    assert policy.rank(RoutedRequest((), 10, 100), ["a", "b"])[0] == "a", "who wants no drafts does not care"


def test_full_replicas_are_left_out():
    policy = make(2, max_ongoing_requests=3)
    assert Counter(send(policy, prompt(1)) for _ in range(6)) == {"a": 3, "b": 3}
    assert policy.rank(prompt(1), ["a", "b"]) == []
    assert sorted(policy.rank(RoutedRequest(), ["a", "b"], even_full=True)) == ["a", "b"]


def test_failed_and_unreachable_replicas_are_avoided_while_there_are_others():
    now = [0.0]
    policy = make(2, clock=lambda: now[0])
    request = prompt(1)
    home = send(policy, request)
    other = "b" if home == "a" else "a"
    assert policy.rank(prompt(1), ["a", "b"], frozenset({home})) == [other]
    policy.suspect(home)
    assert policy.rank(prompt(1), ["a", "b"]) == [other]
    assert policy.rank(prompt(1), [home]) == [home]
    now[0] = SUSPECT_S
    assert policy.rank(prompt(1), ["a", "b"])[0] == home
    policy.update({home: {"serving": False}, other: {}})
    assert policy.rank(prompt(1), ["a", "b"]) == [other]


def test_a_replica_that_is_gone_leaves_nothing_behind():
    policy, request = make(2), prompt(1)
    home, other = policy.rank(request, ["a", "b"])
    policy.assign(request, other, "k")
    assert policy.rank(prompt(1), ["a", "b"])[0] == other, "what it has cached outweighs one request"
    policy.update({home: {}})
    policy.update({home: {}, other: {}})
    assert policy.load.tokens(other) == 0
    assert not policy.release(other, "k")
    assert policy.rank(prompt(1), ["a", "b"])[0] == home


def test_other_callers_requests_count_as_often_as_they_are_reported():
    policy = make(2)
    policy.assign(RoutedRequest((), 300, 100), "a", "mine")
    policy.update({"a": {"requests": 1}, "b": {"requests": 3}})
    assert policy.load.tokens("a") == 400
    assert policy.load.tokens("b") == 3 * 400, "taken to be like our own"
    assert policy.rank(RoutedRequest((), 10, 10), ["a", "b"])[0] == "a"
    policy.release("a", "mine")
    assert policy.load.tokens("b") == 3 * 512
    policy.update({"a": {"requests": 1}, "b": {"requests": 2}})
    assert policy.load.tokens("a") == 0, "Serve passes all reports on when one changes: this is an old one"


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


def test_the_least_used_block_goes_first_and_from_the_end_of_its_prompt():
    index = index_of(a=ONE)
    index.insert("a", token_fingerprint(OTHER))
    index.set_capacity("a", 192)  # of 256
    assert index.num_tokens("a") == 192
    assert index.match(token_fingerprint(ONE)) == {"a": 128}, "the older ending is gone, the common beginning is not"
    assert index.match(token_fingerprint(OTHER)) == {"a": 192}
    for number in range(50):
        index.insert("a", token_fingerprint(OTHER))
        index.insert("a", token_fingerprint([1000 + number] * 320))
        assert index.num_tokens("a") <= 192
