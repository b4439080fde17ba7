"""Ratios with their intervals, acceptance out of counters, and the table."""

from __future__ import annotations

import math
from typing import Any

import pytest

from outrider.deploy.bench.load import Turn, parse_counters
from outrider.deploy.bench.report import acceptance, interval, ratios, same_answers, side, student_t, table

METRICS = """# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{model_name="m",replica="a"} 10
vllm:spec_decode_num_drafts_total{model_name="m",replica="b"} 10
# TYPE vllm:spec_decode_num_draft_tokens counter
vllm:spec_decode_num_draft_tokens_total{model_name="m"} 80
# TYPE vllm:spec_decode_num_accepted_tokens counter
vllm:spec_decode_num_accepted_tokens_total{model_name="m"} 60
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total{model_name="m"} 80
# TYPE outrider:proposal_origins counter
outrider:proposal_origins_total{model_name="m",origin="main_line"} 15
outrider:proposal_origins_total{model_name="m",origin="miss"} 5
# TYPE outrider:link_epoch gauge
outrider:link_epoch 3
"""


def turn(speed: float = 10.0, ttft: float = 100.0, tpot: float = 20.0, texts: tuple[str, ...] = ("a",)) -> Turn:
    figures = {"duration": 2.0, "total_output_tokens": 2 * speed, "output_throughput": speed}
    for name, value in (("ttft", ttft), ("tpot", tpot)):
        figures |= {f"{kind}_{name}_ms": value for kind in ("mean", "median", "p99")}
    return Turn(figures, parse_counters(METRICS), list(texts))


def test_the_interval_is_of_the_logarithms_of_the_ratios() -> None:
    found = interval([1.1, 1.1**2, 1.1**3])
    half = 4.303 * math.log(1.1) / math.sqrt(3)
    assert found["ratio"] == pytest.approx(1.1**2)
    assert found["high"] / found["ratio"] == pytest.approx(math.exp(half))
    assert interval([2.0]) == {"ratio": pytest.approx(2.0), "low": None, "high": None, "pairs": 1}
    assert student_t(10) == pytest.approx(2.228, abs=3e-3), "by the expansion"
    assert found["ratio"] / found["low"] == pytest.approx(found["high"] / found["ratio"])


def test_acceptance_and_origins_are_shares_of_what_was_counted() -> None:
    found = acceptance(parse_counters(METRICS))
    assert found["acceptance_rate"] == 0.75
    assert found["acceptance_length"] == 4.0
    assert found["origins"] == {"drafts": 0.75, "target": 0.25}
    assert found["lookahead"] == {"main_line": 0.75, "miss": 0.25}
    assert set(acceptance({}).values()) == {None}, "a server that counts nothing"


def report(**sides: list[Turn]) -> dict[str, Any]:
    both = list(sides.values())
    return {
        "ratios": ratios(*both) if len(both) == 2 else None,
        "same_answers": same_answers(*both) if len(both) == 2 else None,
        "machine": {"cpu": "a CPU", "cores": [0, 1], "accelerators": ["a GPU"], "load_average_1min": 0.5},
        "versions": {"vllm": "0.32"},
        **{name: {"settings": {"name": f"{name} server"}, **side(turns)} for name, turns in sides.items()},
    }


def test_the_table_has_a_column_a_side_the_ratio_and_the_machine() -> None:
    shown = table(report(ours=[turn(20), turn(22)], other=[turn(10), turn(10, texts=("b",))]))
    assert "ours server" in shown
    assert "21.00" in shown
    assert "ours / other, output tok/s: 2.098, 95% interval" in shown
    assert "same answers: 1 of 2" in shown
    assert "a CPU, 2 cores, a GPU" in shown
    assert "ours / other" not in table(report(ours=[turn()]))


def test_every_setting_of_the_rival_that_was_tried_is_told() -> None:
    found = report(ours=[turn(20)], other=[turn(10)])
    found["other"]["settings"]["tried"] = [{"name": "vLLM, draft_model, one pass, K = 8", "tok_per_s": 12.345}]
    assert "tried vLLM, draft_model, one pass, K = 8: 12.35 tok/s" in table(found)
