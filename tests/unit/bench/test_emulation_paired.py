"""The interval of a ratio that was measured in turns, and what an ablation prints of it."""

from __future__ import annotations

import argparse

import pytest

from outrider.cluster.config import SpeculationConfig, TargetConfig
from tests.bench.ablation import PARTS, Cell, Compared, add_contenders, contenders, table
from tests.bench.emulation.measurement import Ceiling
from tests.bench.emulation.paired import in_turns, ratio_of_pairs
from tests.bench.emulation.rounds import COLUMNS, RoundTimes, Spread


def test_the_interval_is_students_of_the_logarithms() -> None:
    # Logarithms of 1.1, 1.0, 1.2: mean 0.09254, deviation 0.09119, half 4.303 * 0.09119 / sqrt(3) = 0.22655.
    found = ratio_of_pairs([110.0, 100.0, 120.0], [100.0, 100.0, 100.0])
    assert (found.ratio, found.low, found.high) == pytest.approx((1.09696, 0.87458, 1.37588), abs=1e-4)


def test_what_both_have_in_common_falls_out() -> None:
    found = ratio_of_pairs([52.0, 104.0, 26.0], [50.0, 100.0, 25.0])
    assert (found.low, found.ratio, found.high) == pytest.approx((1.04, 1.04, 1.04))
    with pytest.raises(ValueError, match="two"):
        ratio_of_pairs([1.0], [1.0])


def test_who_is_asked_first_changes_from_pair_to_pair() -> None:
    asked: list[tuple[str, int]] = []
    found = in_turns(["a", "b"], 3, lambda name, number: asked.append((name, number)) or len(asked))
    assert asked == [("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 2), ("b", 2)]
    assert found == {"a": [1, 4, 5], "b": [2, 3, 6]}


def test_every_part_is_one_setting_that_the_default_is_not() -> None:
    defaults = {"speculation": SpeculationConfig(), "target": TargetConfig(model="m")}
    for absence in PARTS.values():
        (((section, keys),),) = (absence.items(),)
        ((name, value),) = keys.items()
        assert getattr(defaults[section], name) != value


def test_somebody_must_be_there_to_compare_with(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_contenders(parser)
    names = [server.name for server in contenders(parser, parser.parse_args(["--without", "lengths,draft-ahead"]))]
    assert names == ["a", "without-lengths", "without-draft-ahead"]
    with pytest.raises(SystemExit):
        contenders(parser, parser.parse_args([]))
    assert "with whom" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parser.parse_args(["--without", "everything"])
    assert "'everything' is none of" in capsys.readouterr().err


def test_a_line_has_a_cell_for_every_column() -> None:
    spread = Spread(1.0, 2.0)
    times = RoundTimes(
        rounds=100,
        tokens=300,
        seconds=3.0,
        spreads=dict.fromkeys(COLUMNS, spread),
        origins={"main": 60, "side": 20, "miss": 15, "none": 5},
        overhead_by_origin={"hit": spread},
    )
    compared = Compared(
        Cell("70b-8b", "usual", "stated", 1, 0.0), "b", Ceiling(118.0, 112.0), ratio_of_pairs([2, 2], [1, 1]),
        [times, times], [times, times],
    )  # fmt: skip
    head, rule, line = table([compared]).splitlines()
    assert head.count("|") == rule.count("|") == line.count("|")
    assert "2.000 [2.000, 2.000] | 100.0, 100.0 | 118.0, 112.0 | 3.00, 3.00 | 60 / 20 / 15 / 5" in line
    assert "1.0, 1.0 | –, – |" in line
