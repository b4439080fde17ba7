"""`outrider bench`: the command line, what the rival is tried with, and what is refused before anything starts."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from outrider.cluster.config import ConfigError, OutriderConfig, parse_config
from outrider.deploy import cli
from outrider.deploy.bench.arguments import add_arguments, candidates, check, load_options, with_cores

NGRAM = parse_config({"target": {"model": "t"}, "drafter": {"method": "ngram"}})


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(["--preset", "x", *arguments])


def pair(drafter: Path) -> OutriderConfig:
    return parse_config({"target": {"model": "t"}, "drafter": {"method": "draft_model", "model": str(drafter)}})


@pytest.mark.parametrize(
    "arguments",
    [
        ["--preset", "smollm2", "--address", "h:1"],
        ["--preset", "smollm2", "--against", "sglang"],
        ["--preset", "smollm2", "--against", "vllm", "--against-k", "2,0"],
        ["--preset", "smollm2", "--against", "vllm", "--against-config", "ngram"],
        ["--preset", "smollm2", "--target-cores", "a"],
        [],
    ],
)
def test_wrong_usage_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", *arguments])
    assert ended.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_options_of_the_load_are_vllms_by_name_and_any_other_behind_a_double_dash() -> None:
    given = ["--dataset-name", "speed_bench", "--dataset-path", "d", "--", "--speed-bench-category", "code"]
    options = load_options(parse(*given))
    assert options[:4] == ["--dataset-name", "speed_bench", "--dataset-path", "d"]
    assert options[-2:] == ["--speed-bench-category", "code"]
    assert "--request-rate" not in options


def test_a_draft_model_made_for_one_pass_is_tried_both_ways_at_every_k(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"pard_token": 7}))
    found = candidates(parse("--against", "vllm", "--against-k", "2,5"), pair(tmp_path))
    one = {"method": "draft_model", "model": str(tmp_path)}
    two = {**one, "parallel_drafting": True}
    assert found == [{**each, "num_speculative_tokens": k} for each in (one, two) for k in (2, 5)]


def test_any_other_draft_model_is_tried_one_token_after_the_other_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    found = candidates(parse("--against", "vllm", "--against-k", "3"), pair(tmp_path))
    assert found == [{"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 3}]


def test_given_configurations_are_tried_instead_and_plain_has_none() -> None:
    given = ["--against-config", '{"method": "ngram"}', "--against-config", '{"method": "suffix"}']
    found = candidates(parse("--against", "vllm", "--against-k", "4", *given), NGRAM)
    assert found == [{"method": method, "num_speculative_tokens": 4} for method in ("ngram", "suffix")]
    assert candidates(parse("--against", "plain"), NGRAM) == [None]


def test_without_a_drafter_vllm_must_be_told_what_to_draft_with() -> None:
    with pytest.raises(ConfigError, match="give --against-config"):
        candidates(parse("--against", "vllm"), parse_config({"target": {"model": "t"}}))


def test_a_file_is_needed_for_the_custom_data_set_alone() -> None:
    with pytest.raises(ConfigError, match="--dataset-path"):
        check(parse())
    check(parse("--dataset-name", "random"))


def test_beside_a_running_server_no_rival_is_started() -> None:
    args = parse("--dataset-path", "d", "--against", "vllm")
    args.address = "http://h:1"
    with pytest.raises(ConfigError, match="--against vllm"):
        check(args)


def test_cores_of_the_command_line_are_checked_like_those_of_a_file() -> None:
    assert with_cores(NGRAM, target=[[0, 1]], drafter=None).target.cores == [[0, 1]]
    with pytest.raises(ConfigError, match=r"target: cores lists 2 sets for 1 ranks"):
        with_cores(NGRAM, target=[[0], [1]])
    with pytest.raises(ConfigError, match="--drafter-cores: there is no drafter section"):
        with_cores(parse_config({"target": {"model": "t"}}), drafter=[[0]])
