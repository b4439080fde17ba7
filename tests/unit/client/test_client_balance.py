"""Which of several servers a client sends the next call to."""

from __future__ import annotations

from deploy.client.attempts import FIRST_REST_S, LOAD_REPORT, LONGEST_REST_S, REPORT_LIFETIME_S, Balancer, requests_held
from outrider.v1 import generation_pb2 as pb


def test_equal_servers_take_turns() -> None:
    balancer = Balancer(3)
    picks = []
    for _ in range(6):
        picks.append(balancer.pick(0.0))
        balancer.done(picks[-1], 0.0)
    assert picks == [0, 1, 2, 0, 1, 2]


def test_the_one_with_the_fewest_calls_under_way_is_next() -> None:
    balancer = Balancer(2)
    assert [balancer.pick(0.0) for _ in range(4)] == [0, 1, 0, 1]
    balancer.done(1, 0.0)
    balancer.done(1, 0.0)
    assert [balancer.pick(0.0) for _ in range(2)] == [1, 1]


def test_what_others_have_sent_counts_as_long_as_the_report_is_young() -> None:
    balancer = Balancer(2)
    assert balancer.pick(0.0) == 0
    balancer.done(0, 0.0, held=3.0)
    assert balancer.loads(0.0) == [3.0, 0.0]
    assert [balancer.pick(1.0) for _ in range(3)] == [1, 1, 1]
    assert balancer.pick(REPORT_LIFETIME_S) == 0, "an old report says nothing"


def test_own_calls_are_not_counted_twice() -> None:
    balancer = Balancer(1)
    for _ in range(3):
        balancer.pick(0.0)
    balancer.done(0, 0.0, held=2.0)
    assert balancer.loads(0.0) == [2.0]


def test_an_unreachable_server_rests_longer_with_every_failure_until_it_answers() -> None:
    balancer = Balancer(2)

    def fail(now_s: float) -> None:
        while balancer.pick(now_s) != 0:
            balancer.done(1, now_s)
        balancer.done(0, now_s, unreachable=True)

    fail(0.0)
    assert balancer.pick(FIRST_REST_S / 2) == 1
    assert balancer.other_is_up(FIRST_REST_S / 2, avoid={1}) is False
    fail(FIRST_REST_S)
    assert balancer.pick(2.5 * FIRST_REST_S) == 1
    assert balancer.pick(3 * FIRST_REST_S) == 0
    balancer.done(0, 3 * FIRST_REST_S)
    assert balancer.other_is_up(3 * FIRST_REST_S, avoid={1})


def test_a_rest_has_a_limit() -> None:
    balancer = Balancer(1)
    for _ in range(20):
        balancer.pick(0.0)
        balancer.done(0, 0.0, unreachable=True)
    assert balancer.other_is_up(LONGEST_REST_S, avoid=())


def test_when_all_rest_the_one_that_is_over_first_is_asked() -> None:
    balancer = Balancer(2)
    for now_s in (0.0, 0.5):
        balancer.done(balancer.pick(now_s), now_s, unreachable=True)
    assert balancer.pick(0.6) == 0


def test_what_was_tried_is_avoided_while_another_is_up() -> None:
    balancer = Balancer(2)
    balancer.pick(0.0)
    balancer.pick(0.0)
    balancer.pick(0.0)  # the first has two calls, the second one
    assert balancer.pick(0.0, avoid={1}) == 0
    balancer.done(0, 0.0, unreachable=True)
    assert balancer.pick(0.0, avoid={1}) == 1


def test_a_load_report_is_read_from_the_trailing_metadata() -> None:
    report = pb.LoadReport(named_metrics={"num_requests_running": 3, "num_requests_waiting": 2})
    assert requests_held([("x", "y"), (LOAD_REPORT, report.SerializeToString())]) == 5.0


def test_what_is_no_load_report_says_nothing() -> None:
    assert requests_held(None) is None
    assert requests_held([("x", "y")]) is None
    assert requests_held([(LOAD_REPORT, b"\xff\xff")]) is None
    assert requests_held([(LOAD_REPORT, pb.LoadReport(application_utilization=0.5).SerializeToString())]) is None
