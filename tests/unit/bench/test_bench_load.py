"""vLLM's own client against a server of OpenAI's API, and what `vllm serve` is started with."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from outrider.cluster.config import ConfigError, parse_config
from outrider.deploy.bench.load import Load
from outrider.deploy.bench.machine import BenchError
from outrider.deploy.bench.servers import RunningServer, command_line, engine_arguments
from tests.tiny_models import write_tokenizer


class Api(BaseHTTPRequestHandler):
    """Streams two words for each prompt, and counts them at /metrics."""

    prompts: list[str]
    fails = False

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            return self._send(json.dumps({"data": [{"id": "m", "root": "m"}]}))
        if self.path == "/metrics":
            text = f"# TYPE vllm:generation_tokens counter\nvllm:generation_tokens_total {2.0 * len(self.prompts)}\n"
            return self._send(text)
        return self._send("")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.fails:
            return self._send("{}", 500)
        self.prompts.append(body["prompt"])
        pieces = [{"choices": [{"text": text}]} for text in (" one", " two")]
        pieces.append({"choices": [], "usage": {"completion_tokens": 2}})
        return self._send("".join(f"data: {json.dumps(piece)}\n\n" for piece in pieces) + "data: [DONE]\n\n")

    def _send(self, text: str, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json" if self.path == "/v1/models" else "text/event-stream")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        """Keep quiet."""


@pytest.fixture
def api() -> Iterator[tuple[str, type[Api]]]:
    kind = type("ThisApi", (Api,), {"prompts": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", kind
        server.shutdown()


@pytest.fixture
def load(tmp_path: Path) -> Load:
    rows = [
        {
            "conversations": [
                {"from": "human", "value": f"question number {i} of many"},
                {"value": f"answer {i} is long"},
            ]
        }
        for i in range(200)
    ]
    (tmp_path / "chats.json").write_text(json.dumps(rows))
    options = {
        "--dataset-name": "sharegpt", "--dataset-path": str(tmp_path / "chats.json"), "--num-prompts": "3",
        "--max-concurrency": "2", "--output-len": "4", "--temperature": "0",
    }  # fmt: skip
    return Load([part for option in options.items() for part in option])


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


def test_turns_of_one_number_ask_the_same_and_of_another_other_prompts(
    api: tuple[str, type[Api]], load: Load, tokenizer: str
) -> None:
    url, kind = api
    for number in (0, 0, 1):
        load.turn(url, number, tokenizer)
    first, again, other = (sorted(kind.prompts[at : at + 3]) for at in (0, 3, 6))
    assert first == again
    assert first != other


def test_a_failed_request_fails_the_turn(api: tuple[str, type[Api]], load: Load, tokenizer: str) -> None:
    api[1].fails = True
    with pytest.raises(BenchError, match="requests failed at http"):
        load.turn(api[0], 0, tokenizer)


def test_an_option_that_the_client_does_not_take_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="unrecognized arguments: --promts"):
        Load(["--dataset-name", "random", "--promts", "3"])


def test_a_running_server_is_one_that_answers(api: tuple[str, type[Api]]) -> None:
    assert RunningServer(api[0]).start(lambda: None) == api[0]
    with pytest.raises(BenchError, match="no server answers there"):
        RunningServer("http://127.0.0.1:9").start(lambda: None)


def test_vllm_serve_reads_the_configuration_back_from_its_command_line() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    config = parse_config(
        {"target": {"model": "t", "max_model_len": 99, "enable_prefix_caching": False, "cores": [[0]]}}
    )
    speculative = {"method": "ngram", "num_speculative_tokens": 3}
    line = command_line(engine_arguments(config, speculative, gpu=False))
    read = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(line)
    assert (read.model, read.max_model_len, read.enable_prefix_caching) == ("t", 99, False)
    assert read.speculative_config == speculative
    assert read.enforce_eager, "as our engines on CPU"
    assert read.async_scheduling is None, "vLLM's default, which is on where the method allows it"
