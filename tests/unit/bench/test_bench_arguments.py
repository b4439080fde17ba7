"""`outrider bench`: the command line, and what is refused before anything starts."""

from __future__ import annotations

import argparse
import socket
from pathlib import Path

import pytest

from outrider.cluster.config import ConfigError, parse_config
from outrider.deploy import cli
from outrider.deploy.bench.arguments import add_arguments, check_comparison, core_sets, load_of, with_cores
from outrider.deploy.bench.load import Dataset
from outrider.deploy.bench.machine import BenchError, check_memory
from outrider.deploy.bench.run import configuration
from outrider.deploy.cli import bench
from outrider.deploy.cli.models import check_can_write
from outrider.deploy.processes import SharedMemoryWatch, StopSignal
from outrider.deploy.progress import Progress

NGRAM = parse_config({"target": {"model": "t"}, "drafter": {"method": "ngram"}})
PAIR = parse_config({"target": {"model": "t"}, "drafter": {"method": "draft_model", "model": "d"}})


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(["--dataset", "p.jsonl", *arguments])


@pytest.mark.parametrize(
    "arguments",
    [
        ["--preset", "smollm2"],
        ["--dataset", "p"],
        ["--dataset", "p", "--preset", "smollm2", "--address", "h:1"],
        ["--dataset", "p", "--preset", "smollm2", "--concurrency", "0"],
        ["--dataset", "p", "--preset", "smollm2", "--against", "sglang"],
        ["--dataset", "p", "--preset", "smollm2", "--against", "vllm", "--against-k", "2,0"],
        ["--dataset", "p", "--preset", "smollm2", "--temperature", "nan"],
        ["--dataset", "p", "--preset", "smollm2", "--other-cores", "3-1"],
        ["--dataset", "p", "--address", "nowhere"],
    ],
)
def test_wrong_usage_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", *arguments])
    assert ended.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_core_sets() -> None:
    assert core_sets("0") == ((0,),)
    assert core_sets("0-2,5") == ((0, 1, 2, 5),)
    assert core_sets("0,1|2-3") == ((0, 1), (2, 3))


def test_cores_of_the_command_line_are_checked_like_those_of_a_file() -> None:
    assert with_cores(NGRAM, ((0, 1),), ((2,),)).target.cores == [[0, 1]]
    with pytest.raises(ConfigError, match=r"target: cores lists 2 sets for 1 ranks"):
        with_cores(NGRAM, ((0,), (1,)), None)
    with pytest.raises(ConfigError, match="--drafter-cores: there is no drafter section"):
        with_cores(parse_config({"target": {"model": "t"}}), None, ((0,),))


def test_a_prompt_has_the_same_seed_in_every_repeat_and_none_when_greedy() -> None:
    dataset = Dataset(Path("d"), "", tuple("abcdef"))
    sampled = load_of(parse("--preset", "x", "--temperature", "0.7", "--seed", "5"))
    assert [(ask.index, ask.text, ask.seed) for ask in sampled.asks(dataset, (1, 4))] == [(1, "b", 5), (4, "e", 6)]
    assert load_of(parse("--preset", "x", "--seed", "5")).asks(dataset, (1,))[0].seed is None


def test_a_turn_fills_the_concurrency_twice() -> None:
    assert load_of(parse("--preset", "x")).chunk == 4
    assert load_of(parse("--preset", "x", "--concurrency", "8")).chunk == 16
    assert load_of(parse("--preset", "x", "--concurrency", "8", "--chunk", "3")).chunk == 3


def test_the_other_side_must_be_possible() -> None:
    check_comparison(parse("--preset", "x"), NGRAM)
    check_comparison(parse("--preset", "x", "--against", "plain"), NGRAM)
    check_comparison(parse("--preset", "x", "--against", "vllm"), PAIR)
    with pytest.raises(ConfigError, match=r"--against vllm: .* the drafter is of method ngram"):
        check_comparison(parse("--preset", "x", "--against", "vllm"), NGRAM)
    with pytest.raises(ConfigError, match="add --target PATH and --drafter PATH"):
        check_comparison(parse("--address", "h:1", "--against", "vllm"), None)
    with pytest.raises(ConfigError, match="--other-cores: there is no other side"):
        check_comparison(parse("--preset", "x", "--other-cores", "0"), NGRAM)


def test_the_other_side_may_be_another_configuration_of_ours() -> None:
    check_comparison(parse("--preset", "x", "--against", "other.yaml"), NGRAM)
    with pytest.raises(ConfigError, match="both servers are started here"):
        check_comparison(parse("--address", "h:1", "--target", "t", "--against", "other.yaml"), NGRAM)
    with pytest.raises(ConfigError, match=r"--other-cores: other\.yaml says it"):
        check_comparison(parse("--preset", "x", "--against", "other.yaml", "--other-cores", "0"), NGRAM)


def test_models_beside_an_address_are_the_other_sides(tmp_path: Path) -> None:
    quiet = Progress()
    for name, size in (("t", 5), ("d", 5), ("e", 6)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(f'{{"vocab_size": {size}}}')
    target, drafter, wrong = (str(tmp_path / name) for name in "tde")
    assert configuration(parse("--address", "h:1"), quiet) is None
    config = configuration(parse("--address", "h:1", "--target", target, "--drafter", drafter), quiet)
    assert config is not None
    assert config.target.model == target
    assert config.drafter is not None
    with pytest.raises(ConfigError, match=r"drafter\.model: its vocabulary has 6 tokens"):
        configuration(parse("--address", "h:1", "--target", target, "--drafter", wrong), quiet)
    with pytest.raises(ConfigError, match="that server has its models"):
        configuration(parse("--address", "h:1", "--drafter", "d"), quiet)
    with pytest.raises(ConfigError, match="that server has its cores"):
        configuration(parse("--address", "h:1", "--target-cores", "0"), quiet)


def test_two_sides_that_do_not_fit_the_memory_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    config = parse_config({"target": {"model": str(tmp_path), "kv_cache_memory_bytes": 10**9}})
    check_memory(config, speculate=False, available=6 * 10**9)
    with pytest.raises(ConfigError, match=r"memory: both sides stay loaded and need about 5\.0 GB, 4\.0 GB"):
        check_memory(config, speculate=False, available=4 * 10**9)


def test_nobody_at_the_address(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        (tmp_path / "p.jsonl").write_text('{"prompt": "a"}')
        args = parse("--address", address)
        args.dataset = tmp_path / "p.jsonl"
        with pytest.raises(BenchError, match=f"--address: no server answers at {address}"):
            bench.prepare(args, tmp_path, Progress(), StopSignal(), SharedMemoryWatch())


def test_a_place_to_write_is_looked_for_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}')
    for option, path, message in (
        ("--json", tmp_path / "none" / "o.json", "--json: .* is no directory"),
        ("--json", tmp_path, "--json: .* cannot be written .Is a directory."),
        ("--json", Path("/proc/o.json"), "--json: /proc/o.json cannot be written"),
        ("--plot", tmp_path / "o.svg", "--plot: .* is not called"),
    ):
        args = parse("--address", "127.0.0.1:1", option, str(path))
        args.dataset = tmp_path / "p.jsonl"
        with pytest.raises(ConfigError, match=message):
            bench.prepare(args, tmp_path, Progress(), StopSignal(), SharedMemoryWatch())


def test_looking_for_a_place_to_write_leaves_what_is_there(tmp_path: Path) -> None:
    new, link, old = (tmp_path / name for name in ("new.json", "link.json", "old.json"))
    link.symlink_to("later.json")
    old.write_text("{}")
    for path in (new, link, old):
        check_can_write("--json", path)
    assert sorted(tmp_path.iterdir()) == [link, old]
    assert old.read_text() == "{}"
