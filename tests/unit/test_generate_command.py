"""``outrider generate``: what it asks for, prints, and exits with."""

from __future__ import annotations

import argparse
import io
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import grpc
import pytest

from outrider.deploy.cli import generate
from outrider.v1 import generation_pb2 as pb
from tests.unit.scripted_service import HANG_GUARD_S, ScriptedService, serving

USAGE = pb.Usage(prompt_tokens=3, completion_tokens=4, total_tokens=7, cached_tokens=1)
METRICS = pb.GenerationMetrics(
    speculative_decoding=pb.SpeculativeDecodingMetrics(
        num_spec_steps=2,
        num_draft_tokens=8,
        num_accepted_draft_tokens=2,
        mean_acceptance_length=2.0,
        draft_acceptance_rate=0.25,
        acceptance_histogram=[1, 0, 1, 0, 0],
    ),
    timing=pb.RequestTiming(queue_time_s=0.5, prefill_time_s=0.25, decode_time_s=2.0, e2e_latency_s=2.75),
)


class Answering(ScriptedService):
    def Generate(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> pb.GenerateResponse:
        self._note(request, context)
        if request.text == "bad":
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "sampling.temperature: -1.0 is out of range;\nsend more")
        return pb.GenerateResponse(
            request_id="r-1", text="grüße", token_ids=[5, 6, 7, 8], finish_reason=pb.FINISH_REASON_STOP,
            stop_reason="END", usage=USAGE, metrics=METRICS,
        )  # fmt: skip

    def GenerateStream(
        self, request: pb.GenerateStreamRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.GenerateStreamResponse]:
        over = self._note(request, context)
        yield pb.GenerateStreamResponse(text_delta="grü", token_ids=[5, 6])
        if request.text == "hang":
            over.wait(HANG_GUARD_S)
        yield pb.GenerateStreamResponse(
            text_delta="ße", token_ids=[7, 8], finish_reason=pb.FINISH_REASON_LENGTH, usage=USAGE, metrics=METRICS
        )


@pytest.fixture
def service() -> ScriptedService:
    return Answering()


@pytest.fixture
def address(service: ScriptedService) -> Iterator[str]:
    with serving(service) as address:
        yield address


def outrider_generate(*arguments: str) -> int:
    parser = argparse.ArgumentParser(prog="outrider generate")
    generate.add_arguments(parser)
    return generate.run(parser.parse_args(arguments))


def test_text_goes_to_stdout_and_one_line_of_statistics_to_stderr(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert outrider_generate("--address", address, "hello") == 0
    printed = capsys.readouterr()
    assert printed.out == "grüße\n"
    assert printed.err.count("\n") == 1
    assert "4 tokens in" in printed.err
    assert "2 of 8 drafts accepted" in printed.err
    assert "length" in printed.err


def test_json_is_one_object_with_every_key(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert outrider_generate("--address", address, "--json", "hello") == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert json.loads(printed.out) == {
        "request_id": "r-1",
        "text": "grüße",
        "token_ids": [5, 6, 7, 8],
        "finish_reason": "stop",
        "stop_reason": "END",
        "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7, "cached_tokens": 1},
        "metrics": {
            "speculative_decoding": {
                "num_spec_steps": 2,
                "num_draft_tokens": 8,
                "num_accepted_draft_tokens": 2,
                "mean_acceptance_length": 2.0,
                "draft_acceptance_rate": 0.25,
                "acceptance_histogram": [1, 0, 1, 0, 0],
            },
            "timing": {"queue_time_s": 0.5, "prefill_time_s": 0.25, "decode_time_s": 2.0, "e2e_latency_s": 2.75},
        },
        "completions": [],
        "prompt_logprobs": [],
    }


@pytest.mark.parametrize("flag", ["--logprobs", "--prompt-logprobs"])
def test_logprobs_are_not_asked_for_where_they_would_not_be_seen(
    address: str, service: ScriptedService, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert outrider_generate("--address", address, flag, "1", "hello") == 2
    assert "--json" in capsys.readouterr().err
    assert service.requests == []


def test_a_dash_reads_the_prompt_from_stdin(
    address: str, service: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("from\na pipe"))
    assert outrider_generate("--address", address, "-") == 0
    assert service.requests[0].text == "from\na pipe"


def test_a_refused_request_is_one_line_and_exit_1(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert outrider_generate("--address", address, "--json", "bad") == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == "outrider: INVALID_ARGUMENT: sampling.temperature: -1.0 is out of range; send more\n"


@pytest.mark.parametrize("form", ["{}", "http://{}", "http://{}/"])
def test_an_address_may_be_written_as_a_browser_shows_it(
    address: str, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert outrider_generate("--address", form.format(address), "hello") == 0
    capsys.readouterr()


def test_https_in_an_address_means_tls(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert outrider_generate("--address", f"https://{address}", "hello") == 1, "this server has none"
    assert "TLS" in capsys.readouterr().err


def test_a_server_of_another_protocol_is_told_apart_from_none(capsys: pytest.CaptureFixture[str]) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert outrider_generate("--address", f"http://127.0.0.1:{server.server_port}", "hello") == 1
        server.shutdown()
    assert "does not speak gRPC; give the gRPC port" in capsys.readouterr().err


def test_an_absent_server_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert outrider_generate("--address", "127.0.0.1:1", "hello") == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "127.0.0.1:1" in error
    assert "outrider serve" in error


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--temperature", "warm", "hello"],
        ["--address", "9000", "hello"],
        ["--address", "localhost:http", "hello"],
        ["--address", "localhost:70000", "hello"],
        ["--address", "https://localhost", "hello"],
        ["--no-speculation", "--num-speculative-tokens", "2", "hello"],
    ],
)
def test_a_wrong_command_line_is_exit_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        outrider_generate(*arguments)
    assert exit_.value.code == 2
    capsys.readouterr()


@pytest.mark.parametrize("path", ["/nowhere", "/tmp"])
def test_a_file_that_cannot_be_read_is_told_by_its_flag(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert outrider_generate("--ca", path, "hello") == 2
    assert f"--ca: cannot read {path}: " in capsys.readouterr().err


def as_a_program(*arguments: str, stdout: int = subprocess.PIPE) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "outrider.deploy.cli", "generate", *arguments],
        stdout=stdout,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )


def test_an_interrupt_cancels_the_request_and_exits_130(address: str, service: ScriptedService) -> None:
    # What a shell has put in the background, CI among it, ignores SIGINT, and so would the child.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        child_of_a_terminal = as_a_program("--address", address, "hang")
    finally:
        signal.signal(signal.SIGINT, before)
    with child_of_a_terminal as child:
        assert child.stdout is not None
        assert child.stdout.read(3) == "grü"
        child.send_signal(signal.SIGINT)
        _, error = child.communicate(timeout=HANG_GUARD_S)
    assert child.returncode == 130
    assert error == "outrider: interrupted\n"
    assert service.cancelled.wait(HANG_GUARD_S)
