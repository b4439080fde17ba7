"""``outrider top``: what it computes from two looks, how it draws it, where it gets it, how it fails."""

import contextlib
import io
import json
import os
import pty
import subprocess
import sys
import termios
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import grpc
import pytest
from rich.console import Console

from outrider.actors.observability.metrics import IngressMetrics
from outrider.actors.serving.scaling_board import Scaling
from outrider.deploy.cli import main, top
from outrider.deploy.client.error import OutriderError
from outrider.deploy.top import LinkView, ReplicaView, ScalingView, ScrapeError, View, parse, view, view_of_status
from outrider.v1 import generation_pb2 as pb
from tests.unit.observability.test_application_metrics import exposed


def text(replicas="a", tokens=0, accepted=0, drafts=0, main=0, miss=0, k4=0, k0=0, step=(0, 0.0), down=()):
    """An exposition of replicas that have counted so much."""
    lines = [exposed("outrider:replicas_silent", len(down))]
    for replica in replicas:
        of = f'replica="{replica}"'
        if replica in down:
            lines.append(f"outrider:replica_up{{{of}}} 0\n")
            continue
        count, seconds = step
        lines.append(
            f"outrider:replica_up{{{of}}} 1\n"
            f'outrider:build_info{{{of},model_name="m"}} 1\n'
            f"vllm:num_requests_running{{{of}}} 3\n"
            f"vllm:num_requests_waiting{{{of}}} 1\n"
            f"vllm:kv_cache_usage_perc{{{of}}} 0.5\n"
            f"vllm:generation_tokens_total{{{of}}} {tokens}\n"
            f"vllm:spec_decode_num_drafts_total{{{of}}} {drafts}\n"
            f"vllm:spec_decode_num_draft_tokens_total{{{of}}} {4 * drafts}\n"
            f"vllm:spec_decode_num_accepted_tokens_total{{{of}}} {accepted}\n"
            f'outrider:proposal_origins_total{{{of},origin="main_line"}} {main}\n'
            f'outrider:proposal_origins_total{{{of},origin="miss"}} {miss}\n'
            f'outrider:chosen_lengths_total{{{of},k="4"}} {k4}\n'
            f'outrider:chosen_lengths_total{{{of},k="0"}} {k0}\n'
            f'outrider:link_state{{{of},state="up"}} 1\noutrider:link_state{{{of},state="down"}} 0\n'
            f'outrider:link_backend{{{of},backend="local"}} 1\n'
            f"outrider:link_epoch{{{of}}} 2\noutrider:link_reconnects_total{{{of}}} 1\n"
            f"outrider:link_rtt_seconds{{{of}}} 0.00015\noutrider:drafter_up{{{of}}} 1\n"
            f"outrider:drafter_sequences{{{of}}} 3\n"
        )
        for part, share in (("step", 1.0), ("step_target", 0.5), ("step_draft", 0.25), ("proposal_wait", 0.3)):
            lines.append(
                f"outrider:{part}_seconds_sum{{{of}}} {share * seconds}\n"
                f"outrider:{part}_seconds_count{{{of}}} {count}\n"
            )
    return "".join(lines)


def render(shown, width=100, colour=False):
    """The lines of a screen so wide."""
    screen = Console(
        file=io.StringIO(), width=width, force_terminal=colour, color_system="standard" if colour else None, _environ={}
    )
    screen.print(top.picture(shown))
    return screen.file.getvalue().splitlines()


BEFORE = parse(text(tokens=100, accepted=50, drafts=20, main=10, miss=10, k4=10, k0=10, step=(10, 1.0)), 10.0)
NOW = parse(text(tokens=150, accepted=80, drafts=30, main=19, miss=11, k4=20, k0=10, step=(20, 1.4)), 12.0)


def test_what_was_counted_between_two_looks():
    shown = view(BEFORE, NOW)
    (replica,) = shown.replicas
    assert (shown.interval_s, shown.tokens_per_s) == (2.0, 25.0)
    assert (replica.running, replica.waiting, replica.kv_cache_usage, replica.model) == (3, 1, 0.5, "m")
    assert replica.acceptance_length == pytest.approx(1 + 30 / 10)
    assert replica.acceptance_rate == pytest.approx(30 / 40)
    assert replica.hit_rate == pytest.approx(9 / 10)
    assert replica.chosen_k == 4
    split = replica.round
    assert (split.period_ms, split.target_ms, split.draft_ms, split.other_ms) == pytest.approx((40, 20, 10, 10))
    assert split.wait_ms == pytest.approx(12)
    assert replica.link == LinkView("up", 2, 1, pytest.approx(150), "local")


def test_what_proxies_refuse_counts_like_what_the_ingress_does():
    refused = (
        'outrider:refused_generations_total{{by="proxy"}} {} \noutrider:refused_generations_total{{by="ingress"}} 4\n'
    )
    looks = [parse(refused.format(proxy), at) for proxy, at in ((10, 1.0), (16, 3.0))]
    assert view(*looks).rejected_per_s == pytest.approx(3)


def test_an_idle_server_shows_what_it_did_since_its_start():
    (replica,) = view(NOW, NOW).replicas
    assert replica.acceptance_length == pytest.approx(1 + 80 / 30)
    assert replica.chosen_k == pytest.approx(80 / 30)
    assert replica.tokens_per_s == 0


def test_a_counter_that_fell_began_anew():
    (replica,) = view(NOW, parse(text(tokens=30), 13.0)).replicas
    assert replica.tokens_per_s == 30


def test_a_single_look_has_no_rates_and_a_server_that_has_done_nothing_no_ratios():
    (replica,) = view(None, parse(text(), 0.0)).replicas
    assert (replica.tokens_per_s, replica.acceptance_length, replica.hit_rate, replica.round) == (0, None, None, None)


def test_replicas_are_told_apart_and_the_silent_one_has_no_numbers():
    shown = view(None, parse(text("ab", down="b"), 0.0))
    assert [(replica.replica, replica.up) for replica in shown.replicas] == [("a", True), ("b", False)]


def test_the_picture_has_every_number_and_keeps_to_the_width():
    shown = view(BEFORE, NOW)
    lines = render(shown, width=120)
    header, _, names, row, round_, link, drafter = lines
    assert header == "outrider · m · 1 of 1 replicas up · 3 running, 1 waiting · 25.0 tok/s"
    assert names.split()[:3] == ["REPLICA", "STATE", "RUN"]
    assert row.split() == ["a", "up", "3", "1", "50%", "25.0", "0.0", "4.00", "75%", "90%", "4.0", "0.0", "0"]
    assert "round 40.0 ms" in round_
    assert "target 20.0 · draft 10.0 · other 10.0 · waited 12.0" in round_
    assert round_.count("█") == 2 * round_.count("▒") == 12
    assert link.strip() == "link up over local, epoch 2, 1 reconnect, round trip 150 us"
    assert drafter.strip().startswith("drafter 3 sequences")
    assert all(len(line) <= 40 for line in render(shown, width=40))


def test_a_drafter_of_the_pool_is_no_replica_that_serves():
    pooled = (
        'outrider:replica_up{replica="p"} 1\noutrider:build_info{replica="p",model_name="m"} 1\n'
        'outrider:drafter_up{replica="p"} 1\noutrider:drafter_sequences{replica="p"} 7\n'
        'outrider:drafter_links{replica="p"} 4\n'
    )
    shown = view(None, parse(text("ab") + pooled, 0.0))
    assert [replica.is_pooled for replica in shown.replicas] == [False, False, True]
    lines = render(shown, width=120)
    assert lines[0].startswith("outrider · m · 2 of 2 replicas up · a pool of 1 · 6 running")
    row, drafter = lines[-2:]
    assert row.split()[:3] == ["p", "drafts", "-"]
    assert drafter.strip().startswith("drafter 7 sequences of 4 targets, ")


def test_replicas_that_follow_the_load_are_in_the_first_line():
    metrics = IngressMetrics()
    fixed = parse(text() + metrics.text(), 0.0)
    assert view(None, fixed).scaling is None
    assert "wanted" not in render(view(None, fixed), width=150)[0]
    metrics.scaling = Scaling(wanted=3, running=1, least=1, most=4, reason="queue")
    shown = view(None, parse(text() + metrics.text(), 0.0))
    assert shown.scaling == ScalingView(3, 1, 4, "queue")
    assert "1 of 1 replicas up · 3 of at most 4 wanted (queue) · " in render(shown, width=150)[0]


def test_what_is_wrong_is_red():
    down = View(1.0, [ReplicaView("a", up=True, link=LinkView("down", 1, 0, 0)), ReplicaView("b", up=False)])
    red = [line for line in render(down, colour=True) if "\x1b[31m" in line]
    assert len(red) == 2
    assert "silent" in red[1]
    assert not any("\x1b" in line for line in render(down))


def test_without_any_replica_it_says_so():
    assert render(View(0.0))[-1] == "no replica has answered yet"


STATUS = pb.GetServerStatusResponse(
    model="m",
    target=pb.EngineStatus(running=2),
    link=pb.LinkStatus(state=pb.LINK_STATE_UP, epoch=3),
    rounds=pb.RoundStatistics(drafted_rounds=4, mean_acceptance_length=3.5, main_line_hits=3, misses=1),
)


def test_the_status_of_one_replica_has_to_do_without_http():
    (replica,) = view_of_status(STATUS).replicas
    assert (replica.acceptance_length, replica.hit_rate, replica.running) == (3.5, 0.75, 2)
    assert replica.link.epoch == 3
    assert not replica.drafter.up, "it did not answer the status call"


def broken():
    raise ScrapeError("no metrics there")


def test_grpc_stands_in_for_http_from_the_first_look_on():
    source = top.Source(broken, lambda: view_of_status(STATUS))
    assert source.look().replicas[0].running == 2
    assert "--http" in source.note
    assert not source.has_rates
    source.look()


def test_a_server_that_stops_answering_keeps_its_last_picture_and_a_note():
    looks = [BEFORE, NOW]
    source = top.Source(lambda: looks.pop(0) if looks else broken(), lambda: None)
    source.look()
    shown = source.look()
    assert source.look() == shown
    assert "NO ANSWER" in source.note


def test_nobody_there_is_one_line_and_status_1(monkeypatch, capsys):
    def refused(address, tls):
        raise OutriderError(grpc.StatusCode.UNAVAILABLE, f"no server answers at {address}")

    monkeypatch.setattr(top, "_status", refused)
    monkeypatch.setattr(top, "scrape", lambda address, tls: broken())
    assert main(["top", "127.0.0.1:1", "--once"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "no metrics there" in err
    assert "no server answers at 127.0.0.1:1" in err


def test_one_look_prints_and_exits_as_text_and_as_json(monkeypatch, capsys):
    for arguments, check in (
        ([], lambda out: "25.0 tok/s" in out),
        (["--json"], lambda out: json.loads(out)["replicas"][0]["hit_rate"] == pytest.approx(0.9)),
    ):
        looks = [BEFORE, NOW]
        asked = []
        monkeypatch.setattr(top, "scrape", lambda address, tls, a=asked, q=looks: (a.append(address), q.pop(0))[1])
        assert main(["top", "there:9000", "--once", "--interval", "0.1", *arguments]) == 0
        assert check(capsys.readouterr().out)
        assert asked == ["there:8000", "there:8000"]


def test_a_pipe_that_closes_is_no_error(monkeypatch):
    read, write = os.pipe()
    os.close(read)
    looks = [BEFORE, NOW]
    monkeypatch.setattr(top, "scrape", lambda address, tls: looks.pop(0))
    with open(write, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert main(["top", "there:9000", "--once", "--interval", "0.1"]) == 0
        os.dup2(os.open(os.devnull, os.O_WRONLY), write)  # what is buffered has somewhere to go


class Metrics(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text("ab", tokens=5).encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def metrics_address():
    server = HTTPServer(("127.0.0.1", 0), Metrics)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_it_takes_the_second_screen_and_leaves_the_terminal_as_it_was(metrics_address):
    """On a real terminal: q ends it, is not shown, and the cursor and the modes are back."""
    terminal, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (20, 100))
    modes = termios.tcgetattr(theirs)
    command = [sys.executable, "-m", "outrider.deploy.cli", "top", "--http", metrics_address]
    environment = {**os.environ, "TERM": "xterm-256color"}
    environment = {name: value for name, value in environment.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    root = Path(__file__).parents[3]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, cwd=root)
    try:
        shown = b""
        while b"5 tok/s" not in shown and b"epoch 2" not in shown:
            shown += os.read(terminal, 4096)
        assert not termios.tcgetattr(theirs)[3] & termios.ECHO
        os.write(terminal, b"q")
        assert process.wait(60) == 0
        assert termios.tcgetattr(theirs) == modes
        os.set_blocking(terminal, False)
        with contextlib.suppress(BlockingIOError):
            while more := os.read(terminal, 4096):
                shown += more
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
        os.close(theirs)
    out = shown.decode()
    for enter, leave in (("\x1b[?1049h", "\x1b[?1049l"), ("\x1b[?25l", "\x1b[?25h")):
        assert out.index(enter) < out.index("outrider · m · 2 of 2 replicas up") < out.rindex(leave)
    assert "\x1b[1m" in out


def test_an_interval_is_checked(capsys):
    with pytest.raises(SystemExit):
        main(["top", "--interval", "0"])
    assert "0.1 to 3600" in capsys.readouterr().err


def test_what_is_no_exposition_is_refused():
    with pytest.raises(ScrapeError, match="text format"):
        parse('x{a="b" 1\n', 0.0)
