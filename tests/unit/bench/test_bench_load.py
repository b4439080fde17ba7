"""vLLM's own client against servers of OpenAI's API, one or two in turns, and what `vllm serve` is started with."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outrider.deploy import cli
from outrider.deploy.bench import run
from outrider.deploy.bench.load import Load
from outrider.deploy.bench.machine import BenchError
from tests.support.models.tiny_models import write_tokenizer
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
    printed = capsys.readouterr()
    assert "ours / other, output tok/s" in printed.out
    assert "shutting down" not in printed.err, "the servers stay"
