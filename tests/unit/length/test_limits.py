"""Limits that cannot work are refused by name."""

import pytest

from actors.length.limits import LengthLimits


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_tokens": 0}, r"max_tokens \(0\) must be at least 1"),
        ({"max_tokens": 4, "plan_rounds": 0}, "plan_rounds"),
        ({"max_tokens": 4, "request_memory": 1}, "request_memory"),
        ({"max_tokens": 4, "probe_after": 32, "probe_after_max": 16}, "probe_after_max .16. is below probe_after .32."),
        ({"max_tokens": 4, "probe_share": 1.0}, "probe_share"),
        ({"max_tokens": 4, "hysteresis": -0.1}, "hysteresis"),
    ],
)
def test_wrong_limits_are_named(limits, message):
    with pytest.raises(ValueError, match=message):
        LengthLimits(**limits)
