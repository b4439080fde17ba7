"""vLLM's own client against servers of OpenAI's API, one or two in turns, and what `vllm serve` is started with."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outrider.cluster.config import parse_config
from outrider.deploy import cli
from outrider.deploy.bench import run, servers
from outrider.deploy.bench.load import Load
from outrider.deploy.bench.machine import BenchError
from outrider.deploy.bench.servers import RunningServer, command_line, engine_arguments
from tests.support.models.tiny_models import build_tiny_llama, write_tokenizer
from tests.unit.bench import played_api
from tests.unit.bench.played_api import Api


@pytest.fixture
def api() -> Iterator[tuple[str, type[Api]]]:
    with played_api.server() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", server.RequestHandlerClass  # type: ignore[misc]
        server.shutdown()


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    rows: list[dict[str, Any]] = [
        {
            "conversations": [
                {"from": "human", "value": f"question number {i} of many"},
                {"value": f"answer {i} is long"},
            ]
        }
        for i in range(200)
    ]
    (tmp_path / "chats.json").write_text(json.dumps(rows))
    given = {
        "--dataset-name": "sharegpt", "--dataset-path": str(tmp_path / "chats.json"), "--num-prompts": "3",
        "--max-concurrency": "2", "--output-len": "4", "--temperature": "0",
    }  # fmt: skip
    return [part for option in given.items() for part in option]


@pytest.fixture
def load(options: list[str]) -> Load:
    return Load(options)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
    return str(path)


def test_a_turn_has_the_clients_figures_the_texts_and_what_the_server_counted(
    api: tuple[str, type[Api]], load: Load, tokenizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    url, _ = api
    turn = load.turn(url, 0, tokenizer)
    assert (turn.figures["completed"], turn.figures["total_output_tokens"]) == (3, 6)
    assert turn.figures["output_throughput"] > 0
    assert turn.texts == [" one two"] * 3
    assert turn.counted == {"vllm:generation_tokens_total": 6.0}
    assert capsys.readouterr().out == "", "stdout is the report's"


def test_a_failed_request_fails_the_turn(api: tuple[str, type[Api]], load: Load, tokenizer: str) -> None:
    api[1].fails = True
    with pytest.raises(BenchError, match="requests failed at http"):
        load.turn(api[0], 0, tokenizer)


def test_vllm_serve_reads_the_configuration_back_from_its_command_line() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    config = parse_config(
        {"target": {"model": "t", "max_model_len": 99, "engine_args": {"enable_prefix_caching": False}, "cores": [[0]]}}
    )
    speculative = {"method": "ngram", "num_speculative_tokens": 3}
    line = command_line(engine_arguments(config, speculative, gpu=False))
    read = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(line)
    assert (read.model, read.max_model_len, read.enable_prefix_caching) == ("t", 99, False)
    assert read.speculative_config == speculative
    assert read.enforce_eager, "as our engines on CPU"
    assert read.async_scheduling is None, "vLLM's default, which is on where the method allows it"


def test_two_running_servers_answer_the_same_in_turns(
    api: tuple[str, type[Api]],
    options: list[str],
    tokenizer: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(run, "SETTLE_S", 0.0)
    url, kind = api
    out = tmp_path / "out.json"
    sides = ["--address", url, "--against", url, "--rounds", "3", "--json", str(out)]
    assert cli.main(["bench", *sides, *options, "--", "--tokenizer", tokenizer]) == 0
    report = json.loads(out.read_text())
    assert report["ratios"]["output_throughput"]["pairs"] == 3
    assert report["same_answers"] == {"same": 9, "of": 9}
    assert len(report["ours"]["turns"]) == len(report["other"]["turns"]) == 3
    measured = kind.prompts[6:]  # each side has been asked three to warm up
    for pair in range(3):
        ours, other = (sorted(measured[at : at + 3]) for at in (6 * pair, 6 * pair + 3))
        assert ours == other
    assert sorted(measured[:3]) != sorted(measured[6:9]), "each round has other prompts"
    assert "ours / other, output tok/s" in capsys.readouterr().out


def test_the_rival_runs_at_its_best_of_the_settings_that_vllm_does_not_refuse(
    api: tuple[str, type[Api]],
    options: list[str],
    tmp_path: Path,
    outrider_home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`vllm serve` and ours are played; that they are started, asked and ended is not."""
    monkeypatch.setattr(run, "SETTLE_S", 0.0)
    monkeypatch.setattr(servers, "VLLM_SERVE", "from tests.unit.bench.played_api import main; main()")
    monkeypatch.setattr(run, "OutriderServer", lambda *_: RunningServer(api[0]))
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps({"target": {"model": str(build_tiny_llama(tmp_path / "tiny"))}}))
    rival = ["--against", "vllm", "--against-k", "3,4"]
    rival += [
        "--against-config",
        json.dumps({"method": "ngram"}),
        "--against-config",
        json.dumps({"method": played_api.REFUSED}),
    ]
    out = tmp_path / "out.json"
    sides = ["--config", str(config), "--rounds", "1", "--json", str(out), "--other-cores", "0", "--other-cores", "0-0"]
    assert cli.main(["bench", *sides, *rival, *options]) == 0
    report = json.loads(out.read_text())
    assert report["other"]["settings"]["environment"]["VLLM_CPU_OMP_THREADS_BIND"] in ("0", "0-0")
    assert {each["speculative"]["method"] for each in report["other"]["settings"]["tried"]} == {"ngram"}
    assert f"{played_api.REFUSED} is refused" in capsys.readouterr().err
    assert [each["cores"] for each in report["other"]["settings"]["tried"]] == ["0", "0", "0-0"]
