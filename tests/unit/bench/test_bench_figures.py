"""`outrider bench`: from arrivals to figures, the alternation of the sides, the report and its picture."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from outrider.deploy.bench import run as alternate
from outrider.deploy.bench.load import Answer, Ask, Chunk, SideName
from outrider.deploy.bench.machine import BenchError
from outrider.deploy.bench.opponent import Setting, Trial, best, one_core_fewer, prompts_to_try, try_out
from outrider.deploy.bench.plot import draw, round_parts
from outrider.deploy.bench.report import (
    acceptance,
    bound,
    equal_answers,
    inter_token_s,
    lookahead,
    make_report,
    ratio_of,
    round_time,
    rounds_between,
    serving,
    side_figures,
    table,
)
from outrider.deploy.bench.run import Alternation, chunks_of, warm_up_asks
from outrider.deploy.progress import Progress
from outrider.v1 import generation_pb2 as pb

ANSWER = Answer(3, ((0.5, 1), (0.8, 3), (1.0, 1)), 1.1, (1, 2, 3, 4, 5), drafted_rounds=2, drafted=8, accepted=2)
EMPTY = Answer(4, (), 0.2, ())


def ask(index: int) -> Ask:
    return Ask(index, f"prompt {index}", 64, 0.0, None)


def chunk(side: SideName, pair: int, seconds: float, *answers: Answer, foreign: float | None = None) -> Chunk:
    return Chunk(side, pair, seconds, answers or (ANSWER,), foreign_cores=foreign)


def test_an_answer_survives_json() -> None:
    assert Answer.from_json(json.loads(json.dumps(asdict(ANSWER)))) == ANSWER


def test_inter_token_latency_is_the_gap_divided_by_its_messages_tokens() -> None:
    assert inter_token_s([ANSWER]) == pytest.approx([0.1, 0.1, 0.1, 0.2])
    assert inter_token_s([EMPTY]) == []


def test_figures_of_a_side() -> None:
    figures = side_figures([chunk("ours", 0, 2.0), chunk("ours", 1, 3.0, ANSWER, EMPTY)], 2, "core")
    assert (figures["requests"], figures["output_tokens"], figures["seconds"]) == (3, 10, 5.0)
    assert figures["output_tok_per_s"] == 2.0
    assert figures["output_tok_per_s_per_core"] == 1.0
    assert figures["ttft_ms"] == {"p50": pytest.approx(500), "p99": pytest.approx(500)}
    assert figures["latency_ms"]["p50"] == pytest.approx(1100)
    assert figures["message_gap_ms"]["p50"] == pytest.approx(250)


def test_cores_that_are_not_known_divide_nothing() -> None:
    assert side_figures([chunk("ours", 0, 2.0)], None, "core")["output_tok_per_s_per_core"] is None


def test_acceptance_counts_rounds_not_answers() -> None:
    assert acceptance([ANSWER, ANSWER, EMPTY])["acceptance_rate"] == 0.25
    assert acceptance([ANSWER])["acceptance_length"] == 2.0
    assert acceptance([EMPTY])["acceptance_rate"] is None


def test_serving_is_what_the_client_sees_beyond_the_engine() -> None:
    assert serving([ANSWER, EMPTY]) is None
    told = replace(ANSWER, engine_decode_s=0.49, engine_latency_s=1.09)
    slower = replace(told, engine_decode_s=0.5, engine_latency_s=1.07)
    figures = serving([told, slower, EMPTY])
    assert figures is not None
    assert figures["way_ms"]["p50"] == pytest.approx(20)
    assert figures["added_share"] == pytest.approx(1.0 / 0.99 - 1)


def test_the_ratio_is_of_total_throughput_and_its_spread_of_pairs() -> None:
    ours = [chunk("ours", 0, 1.0), chunk("ours", 1, 3.0)]
    other = [chunk("other", 0, 2.0), chunk("other", 1, 3.0)]
    total, spread = ratio_of(ours, other)
    assert total == pytest.approx(5 / 4)
    assert spread == {"min": 1.0, "median": 1.5, "max": 2.0, "pairs": 2}


def test_answers_are_compared_prompt_by_prompt() -> None:
    changed = Answer(4, ((0.1, 1),), 0.1, (9,))
    assert equal_answers([chunk("ours", 0, 1.0, ANSWER, EMPTY)], [chunk("other", 0, 1.0, changed, ANSWER)]) == {
        "same": 1,
        "of": 2,
    }


def test_turns_are_even_and_hold_every_prompt_once_a_repeat() -> None:
    turns = chunks_of([ask(i) for i in range(10)], 4, repeats=2)
    assert [len(turn) for turn in turns] == [3, 3, 4] * 2
    assert [one.index for turn in turns[:3] for one in turn] == list(range(10))


def test_warming_up_leaves_no_prefix_of_a_prompt_behind() -> None:
    asks = [ask(i) for i in range(5)]
    warm = warm_up_asks(asks, 3)
    assert len(warm) == 3
    assert all(not hot.text.startswith(real.text[:1]) for hot, real in zip(warm, asks, strict=False))
    assert all(hot.max_tokens <= real.max_tokens for hot, real in zip(warm, asks, strict=False))


def test_the_fastest_setting_wins_and_of_equals_the_first() -> None:
    two, three, six = (Setting(k, ((0, 1),)) for k in (2, 3, 6))
    assert best([Trial(two, 10.0), Trial(three, 12.0), Trial(six, 11.0)]) == three
    assert best([Trial(three, 12.0), Trial(six, 12.0)]) == three
    assert str(three) == "in-process vLLM, K = 3, cores 0,1:"
    assert str(Setting(None, None)) == "in-process vLLM, no speculation:"
    assert [one.index for one in prompts_to_try([ask(i) for i in range(8)], 1)] == [0, 2, 4, 6]


def test_a_core_is_left_to_the_scheduler_only_where_there_is_a_second_one() -> None:
    assert one_core_fewer(((0, 1), (2, 3))) == ((0,), (2,))
    assert one_core_fewer(((0, 1), (2,))) is None
    assert one_core_fewer(None) is None


class FakeEngine:
    """Gives an answer of as many tokens as its K."""

    def __init__(self, k: int, log: list[str]) -> None:
        self._k, self._log = k, log

    def start(self, waiting: Callable[[], None]) -> dict[str, Any]:
        self._log.append(f"start {self._k}")
        waiting()
        return {}

    def run(
        self, asks: Sequence[Ask], concurrency: int, on_progress: Callable[[int, int], None]
    ) -> tuple[float, list[Answer]]:
        if self._k == 6:
            raise BenchError("out of memory")
        return 2.0, [Answer(0, (), 0.0, (1,) * self._k)]

    def stop(self) -> None:
        self._log.append(f"stop {self._k}")


def test_settings_are_tried_one_engine_at_a_time_and_each_is_stopped() -> None:
    log: list[str] = []

    def make(setting: Setting) -> Any:
        return FakeEngine(setting.k or 0, log)

    def quiet(text: str) -> None:
        pass

    settings = [Setting(k, None) for k in (2, 4)]
    trials = try_out(settings, make, [], [ask(0)], 1, quiet, quiet)
    assert [trial.tok_per_s for trial in trials] == [1.0, 2.0]
    with pytest.raises(BenchError):
        try_out([Setting(6, None)], make, [], [ask(0)], 1, quiet, quiet)
    assert log == ["start 2", "stop 2", "start 4", "stop 4", "start 6", "stop 6"]


class FakeSide:
    """Says whose turn it was, and uses as much CPU time as it is told to."""

    def __init__(self, name: SideName, log: list[tuple[str, list[int]]], busy_per_look: float = 0.0) -> None:
        self.name: SideName = name
        self._log, self._busy, self._used = log, busy_per_look, 0.0

    def run(self, asks: Sequence[Ask], on_progress: Callable[[int, int], None]) -> tuple[float, list[Answer]]:
        self._log.append((self.name, [one.index for one in asks]))
        on_progress(1, 2)
        return 1.0, [Answer(one.index, ((0.1, 1),), 0.1, (one.index,)) for one in asks]

    def cpu_seconds(self) -> float | None:
        self._used += self._busy
        return self._used


@pytest.fixture
def no_settling(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    settled: list[int] = []
    monkeypatch.setattr(alternate, "settle", lambda sides, sleep: settled.append(len(sides)))
    return settled


def test_sides_take_turns_over_the_same_prompts_and_engines_settle_before_each(no_settling: list[int]) -> None:
    log: list[tuple[str, list[int]]] = []
    alternation = Alternation([FakeSide("ours", log), FakeSide("other", log)], Progress(io.StringIO()), lambda _: None)
    chunks = list(alternation.run([[ask(0), ask(1)], [ask(2)]]))
    assert log == [("ours", [0, 1]), ("other", [0, 1]), ("ours", [2]), ("other", [2])]
    assert [(one.side, one.pair) for one in chunks] == [("ours", 0), ("other", 0), ("ours", 1), ("other", 1)]
    assert no_settling == [2, 2, 2, 2]


def test_a_side_that_works_out_of_turn_is_told_on(no_settling: list[int]) -> None:
    screen = io.StringIO()
    sides = [FakeSide("ours", []), FakeSide("other", [], busy_per_look=1e6)]
    first = next(Alternation(sides, Progress(screen), lambda _: None).run([[ask(0)]]))
    assert first.resting_cores is not None
    assert first.resting_cores > 1
    assert "it should have rested" in screen.getvalue()


def test_the_rounds_of_a_run_are_what_the_server_counted_meanwhile() -> None:
    before = pb.RoundStatistics(rounds=10, drafted=40, accepted=30)
    after = pb.RoundStatistics(rounds=15, drafted=60, accepted=40)
    after.median.period_ms = 7.5
    counted = rounds_between(before, after)
    assert (counted["rounds"], counted["drafted"], counted["accepted"]) == (5, 20, 10)
    assert "acceptance_rate" not in counted, "a rate of the whole life has no difference"
    assert round_time(after)["period_ms"] == 7.5
    assert round_time(before) == {}


def test_lookahead_shares() -> None:
    shares = lookahead({"main_line_hits": 6, "side_branch_hits": 3, "misses": 1})
    assert shares == {"main_line": 0.6, "side_branch": 0.3, "miss": 0.1, "hit_rate": 0.9, "lookups": 10}
    assert lookahead({"rounds": 5}) is None


def test_the_bound_weighs_hits_and_misses_by_what_each_must_take() -> None:
    counted = {"main_line_hits": 6, "side_branch_hits": 3, "misses": 1, "drafted": 30, "drafted_rounds": 10}
    counted |= {"rounds": 10, "accepted": 20}
    times = {"target_ms": 100.0, "period_ms": 125.0, "draft_step_ms": 30.0}
    found = bound(counted, times)
    assert found is not None
    # Three drafts of 30 ms hide in 100 ms, four do not: 0.6 * 120 + 0.3 * 100 + 0.1 * 190.
    assert found == pytest.approx({"k": 3.0, "period_ms": 121.0, "tok_per_s": 3e3 / 121.0, "share": 121.0 / 125.0})
    assert bound(counted, {**times, "draft_step_ms": 0.0}) is None, "an n-gram drafter reports no step"
    assert bound({"rounds": 10, "drafted_rounds": 0, "drafted": 0, "accepted": 0}, times) is None


def test_the_parts_of_a_round_stack_up_to_its_period() -> None:
    parts = round_parts({"period_ms": 10.0, "target_ms": 7.0, "wait_ms": 1.0, "draft_ms": 8.0})
    assert parts == {"target": 7.0, "waiting for drafts": 1.0, "rest": 2.0}
    assert min(round_parts({"period_ms": 5.0, "target_ms": 6.0, "wait_ms": 0.0}).values()) == 0.0


def report(other: bool = True) -> dict[str, Any]:
    chunks = [chunk("ours", 0, 1.0), chunk("ours", 1, 1.0, foreign=1.5)]
    settings: dict[str, Any] = {"seed": 0, "ours": {"name": "Outrider, K = 4"}}
    settings["load"] = {"concurrency": 1, "temperature": 0.0, "max_tokens": 64}
    settings["machine"] = {"cpu": "a CPU", "accelerators": []}
    settings["dataset"] = {"path": "p.jsonl", "sha256": "0"}
    units: dict[str, int | None] = {"ours": 2}
    if other:
        chunks += [chunk("other", 0, 2.0), chunk("other", 1, 2.0)]
        settings["other"], units["other"] = {"name": "vLLM in-process, K = 3"}, 2
    times = {"period_ms": 10.0, "target_ms": 7.0, "draft_ms": 6.0, "wait_ms": 1.0, "other_ms": 2.0, "samples": 9}
    ours = {"rounds": {}, "lookahead": lookahead({"main_line_hits": 1, "misses": 1}), "round_time": times}
    now = datetime(2026, 1, 2, tzinfo=UTC)
    return make_report(chunks, settings, {"ours": ours}, units, "core", now, now)


def test_the_report_is_json_with_the_ratio_on_top() -> None:
    document = json.loads(json.dumps(report(), allow_nan=False))
    assert document["ratio"] == 2.0
    assert document["ratio_spread"]["pairs"] == 2
    assert document["other"]["settings"]["name"] == "vLLM in-process, K = 3"
    assert document["ours"]["output_tok_per_s_per_core"] == 2.5
    assert document["seed"] == 0
    assert len(document["chunks"]) == 4


def test_the_report_of_one_side_has_no_ratio() -> None:
    document = report(other=False)
    assert document["ratio"] is None
    assert "other" not in document
    assert "ours / other" not in table(document)


def test_the_table_names_both_sides_and_what_spoilt_the_run() -> None:
    text = table(report())
    for expected in ("Outrider, K = 4", "vLLM in-process, K = 3", "ours / other: 2.000", "50.0% hits", "1 of 4 chunks"):
        assert expected in text


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw(report(), tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
