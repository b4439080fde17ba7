"""What is told of versions: the last ones, why each began and ended, in the public API's words."""

import math

from google.protobuf import json_format

from outrider.actors.learning.gate import Difference, Verdict
from outrider.actors.learning.history import MOST_SHOWN, REPLACED, STATES, WITHDRAWN, History, status_of, verdict_row
from outrider.v1 import generation_pb2 as pb

GAIN = Verdict(True, "gain", Difference(0.05, 0.02, 40), Difference(-0.001, 0.03, 40))


def history():
    times = iter(range(1000, 2000))
    made = History(lambda: float(next(times)))
    made.began(0, 0)
    made.ended(REPLACED)
    made.began(1, 30, GAIN)
    made.ended(WITHDRAWN, Difference(-0.1, 0.04, 20))
    made.began(2, 60, None, again=0)
    return made


def told(rows, verdict=None, drafting=1):
    figures = {"version": 2, "steps": 70, "tokens": 900, "refused": {"no_gain": 3}, "last_verdict": verdict}
    status = status_of({"version": drafting, "trainer": {**figures, "versions": rows}})
    return json_format.ParseDict(status, pb.DrafterLearning(), ignore_unknown_fields=False)


def test_the_public_status_has_all_of_it():
    message = told(history().rows({0, 2}), verdict_row(Verdict(False, "no_texts", Difference(0.0, math.inf, 1))))
    assert (message.drafting, message.serving, message.steps, message.tokens) == (1, 2, 70, 900)
    assert dict(message.refused) == {"no_gain": 3}
    assert message.last_comparison.reason == "no_texts"
    assert not message.last_comparison.recent.HasField("margin")
    first, withdrawn, again = message.versions
    assert [version.number for version in message.versions] == [0, 1, 2]
    assert [version.kept for version in message.versions] == [True, False, True]
    assert first.state == pb.DRAFTER_VERSION_STATE_REPLACED
    assert not first.HasField("verdict")
    assert withdrawn.state == pb.DRAFTER_VERSION_STATE_WITHDRAWN
    assert withdrawn.verdict.reason == "gain"
    assert (withdrawn.verdict.recent.mean, withdrawn.verdict.recent.margin) == (0.05, 0.02)
    assert not withdrawn.verdict.HasField("general")
    assert (withdrawn.since.mean, withdrawn.since.texts) == (-0.1, 20)
    assert (withdrawn.step, withdrawn.began_at.seconds) == (30, 1001)
    assert (again.state, again.again) == (pb.DRAFTER_VERSION_STATE_SERVES, 0)
    assert again.HasField("again")
    assert not told(history().rows(())).HasField("last_comparison")


def test_every_state_is_one_of_the_api_s():
    for state in STATES:
        assert pb.DrafterVersionState.Value(f"DRAFTER_VERSION_STATE_{state.upper()}")


def test_the_last_versions_are_shown():
    made = history()
    for number in range(3, 30):
        made.ended(REPLACED)
        made.began(number, number)
    rows = made.rows(())
    assert [row["number"] for row in rows] == list(range(30 - MOST_SHOWN, 30))


def test_a_difference_that_is_none_is_told_as_none():
    """What a status or a file of JSON cannot hold."""
    row = verdict_row(Verdict(False, "not_finite", Difference(math.nan, math.nan, 20)))
    assert row["recent"] == {"mean": 0.0, "margin": None, "texts": 20}
