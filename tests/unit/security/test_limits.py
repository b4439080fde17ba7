"""What a key may use in a minute and at once."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from outrider.actors.serving.access.keys import Key, hash_of
from outrider.actors.serving.access.limits import LimitReached, Limits
from tests.clock import Clock


def key(name: str = "ci", **limits: int) -> Key:
    return Key(name=name, hash=hash_of(name.encode()), scopes=("generate",), **limits)


def ask(limits: Limits, of: Key) -> None:
    with limits.running(of, generates=True):
        pass


def test_a_minutes_requests_at_once_and_then_one_after_the_other():
    clock = Clock(50.0)
    limits, ci = Limits(clock), key(requests_per_minute=30)
    for _ in range(30):
        ask(limits, ci)
    with pytest.raises(LimitReached) as reached:
        ask(limits, ci)
    assert (reached.value.limit, reached.value.most) == ("requests_per_minute", 30)
    assert reached.value.retry_after_s == pytest.approx(2)
    clock.now += 1.9
    with pytest.raises(LimitReached):
        ask(limits, ci)
    clock.now += 0.2
    ask(limits, ci)
    with pytest.raises(LimitReached):
        ask(limits, ci)
    clock.now += 3600
    for _ in range(30):  # idle hours are worth a minute
        ask(limits, ci)
    with pytest.raises(LimitReached):
        ask(limits, ci)


def test_so_many_at_once_and_no_more_however_they_end():
    limits, ci = Limits(Clock(50.0)), key(concurrent_requests=2)
    with ExitStack() as running:
        for _ in range(2):
            running.enter_context(limits.running(ci, generates=True))
        with pytest.raises(LimitReached, match="concurrent_requests"):
            ask(limits, ci)
    with pytest.raises(RuntimeError), limits.running(ci, generates=True):
        raise RuntimeError
    with limits.running(ci, generates=True), limits.running(ci, generates=True):
        pass


def test_tokens_are_counted_when_they_exist_and_made_up_for():
    clock = Clock(50.0)
    limits, ci = Limits(clock), key(tokens_per_minute=600)
    ask(limits, ci)
    limits.count_tokens(ci, 599)
    ask(limits, ci)
    limits.count_tokens(ci, 101)  # 100 more than there were
    with pytest.raises(LimitReached) as reached:
        ask(limits, ci)
    assert reached.value.limit == "tokens_per_minute"
    assert reached.value.retry_after_s == pytest.approx(10.1)
    with limits.running(ci, generates=False):  # what uses no tokens goes on
        pass
    clock.now += 9.9
    with pytest.raises(LimitReached):
        ask(limits, ci)
    clock.now += 0.3
    ask(limits, ci)


def test_one_keys_use_is_not_anothers():
    limits = Limits(Clock(50.0))
    one, other = key("one", requests_per_minute=1), key("other", requests_per_minute=1)
    ask(limits, one)
    with pytest.raises(LimitReached):
        ask(limits, one)
    ask(limits, other)


def test_a_refused_request_costs_nothing():
    clock = Clock(50.0)
    limits, ci = Limits(clock), key(requests_per_minute=1, concurrent_requests=1)
    with limits.running(ci, generates=True):
        for _ in range(5):
            with pytest.raises(LimitReached, match="concurrent"):
                ask(limits, ci)
    clock.now += 60
    ask(limits, ci)


def test_a_limit_that_was_changed_holds_at_once():
    limits = Limits(Clock(50.0))
    for _ in range(5):
        ask(limits, key(requests_per_minute=100))
    ask(limits, key(requests_per_minute=2))
    ask(limits, key(requests_per_minute=2))
    with pytest.raises(LimitReached):
        ask(limits, key(requests_per_minute=2))
    ask(limits, key())


def test_several_processes_keep_a_limit_between_them():
    clock = Clock(50.0)
    limits, ci = Limits(clock, parts=2), key(requests_per_minute=30, concurrent_requests=3, tokens_per_minute=100)
    with ExitStack() as running:
        for _ in range(2):
            running.enter_context(limits.running(ci, generates=True))
        with pytest.raises(LimitReached) as reached:
            ask(limits, ci)
    assert reached.value.most == 3, "what the file says"
    for _ in range(13):
        ask(limits, ci)
    with pytest.raises(LimitReached, match="requests_per_minute"):
        ask(limits, ci)
    clock.now += 60
    limits.count_tokens(ci, 51)
    with pytest.raises(LimitReached, match="tokens_per_minute"):
        ask(limits, ci)
