"""`outrider bench`: the command line, what the rival is tried with, and what is refused before anything starts."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from outrider.cluster.config import ConfigError, parse_config
from outrider.deploy import cli
from outrider.deploy.bench.arguments import add_arguments, candidates, check, load_options
from outrider.deploy.bench.load import Load
from outrider.deploy.bench.servers import engine_arguments


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(["--preset", "x", *arguments])


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


@pytest.mark.parametrize(
    ("text", "url"), [("h:1", "http://h:1"), ("http://h:1/", "http://h:1"), ("https://h:1", "https://h:1")]
)
def test_an_address_is_one_as_in_the_other_commands(text: str, url: str) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(["--address", text, "--against", text])
    assert (args.address, args.against) == (url, url)


def test_a_one_pass_drafter_is_tried_both_ways_and_further_out(tmp_path: Path) -> None:
    def tried(**keys: object) -> set[tuple[bool, int]]:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **keys}))
        config = parse_config({"target": {"model": "t"}, "drafter": {"method": "draft_model", "model": str(tmp_path)}})
        found = candidates(parse("--against", "vllm"), config)
        return {(way.get("parallel_drafting", False), way["num_speculative_tokens"]) for way in found if way}

    sequential = {(False, k) for k in (2, 3, 4, 6)}
    assert tried(pard_token=5) == sequential | {(True, k) for k in (4, 8, 12, 16)}
    assert tried(mask_token_id=None) == sequential


def test_a_configuration_file_is_read_as_serve_reads_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.yaml").write_text("target: {model: /nowhere}")
    assert cli.main(["bench", "--config", str(tmp_path / "c.yaml"), "--dataset-name", "random"]) != 0
    assert "target.model: " in capsys.readouterr().err


def test_what_cannot_be_measured_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="give --against-config"):
        candidates(parse("--against", "vllm"), parse_config({"target": {"model": "t"}}))
    with pytest.raises(ConfigError, match="--dataset-path"):
        check(parse())
    check(parse("--dataset-name", "random"))
    with pytest.raises(ConfigError, match="--against vllm"):
        check(argparse.Namespace(**{**vars(parse("--dataset-path", "d", "--against", "vllm")), "address": "http://h"}))
    with pytest.raises(ConfigError, match="unrecognized arguments: --promts"):
        Load(["--dataset-name", "random", "--promts", "3"])


def test_on_cpu_vllm_has_the_kv_cache_of_both_our_engines() -> None:
    drafter = {"method": "draft_model", "model": "d", "kv_cache_memory_bytes": 100}
    config = parse_config({"target": {"model": "t", "kv_cache_memory_bytes": 1000}, "drafter": drafter})
    plain, drafting = (engine_arguments(config, way, gpu=False) for way in (None, {"method": "m", "model": "d"}))
    assert (plain["kv_cache_memory_bytes"], drafting["kv_cache_memory_bytes"]) == (1000, 1100)
