"""Runs `outrider serve` as an operator does: one line, signals, wrong configurations."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from outrider.deploy.client.sync_client import OutriderClient, OutriderError
from outrider.deploy.processes import SHARED_MEMORY
from tests.support.cluster.outrider_serve import ENDS_WITHIN_S, Served, command, outrider_serve, write_config
from tests.support.cluster.processes import alive
from tests.support.cluster.serving import HANG_GUARD_S, Models, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]

STARTS_WITHIN_S = 900.0
REFUSES_WITHIN_S = 300.0
PROMPT = "to be or not to be, that is the question: to be or not to be"


def shared_memory_entries() -> set[str]:
    return {path.name for path in SHARED_MEMORY.iterdir()}


@pytest.fixture(scope="module")
def shared_memory_before() -> set[str]:
    return shared_memory_entries()


@pytest.fixture(scope="module")
def server(
    models: Models, tmp_path_factory: pytest.TempPathFactory, shared_memory_before: set[str]
) -> Iterator[Served]:
    with outrider_serve(models, tmp_path_factory.mktemp("serve"), speculation={"adaptive": False}) as served:
        yield served


def test_it_outlives_serve_s_controller(server: Served) -> None:
    controller = the_controller(server)
    assert controller is not None
    controller.kill()

    def another() -> bool:
        found = the_controller(server)
        return found is not None and found.pid != controller.pid

    wait_until(another, HANG_GUARD_S, "another controller")
    wait_until(lambda: not controller.is_running(), HANG_GUARD_S, "the former one's end")
    with OutriderClient(server.grpc) as client:
        assert client.generate(PROMPT, max_tokens=4, temperature=0.0, timeout_s=HANG_GUARD_S).token_ids
    assert server.process.poll() is None


def the_controller(server: Served) -> psutil.Process | None:
    for process in server.tree():
        with suppress(psutil.Error):
            if "ServeController" in "".join(process.cmdline()):
                return process
    return None


def test_sigterm_ends_it_cleanly(server: Served, shared_memory_before: set[str]) -> None:
    """Last of those that use the server. A request is under way, and delays the end little."""
    processes = server.tree()
    assert len(processes) > 5
    with OutriderClient(server.grpc) as client:
        stream = client.stream(PROMPT, temperature=0.0)
        next(stream)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(ENDS_WITHIN_S) == 0
        with suppress(OutriderError):
            list(stream)
    assert server.process.stdout is not None
    assert server.process.stdout.read() == "", "one line on stdout, no more"
    wait_until(lambda: not alive(processes), 60.0, "the end of all its processes")
    pids = {str(process.pid) for process in processes} | {str(server.process.pid)}
    left = shared_memory_entries() - shared_memory_before
    assert {name for name in left if pids & set(re.findall(r"\d+", name))} == set()


def refused(path: Path, *arguments: str) -> str:
    """stderr of a server that must not start: exit code 1, one line, soon, no traceback, nothing on stdout."""
    started = time.monotonic()
    done = subprocess.run(
        command("serve", str(path), *(arguments or ("--grpc-port", "0", "--http-port", "0"))),
        capture_output=True, text=True, timeout=REFUSES_WITHIN_S, check=False, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    print(f"refused after {time.monotonic() - started:.1f} s: {done.stderr.strip()}")
    assert (done.returncode, done.stdout) == (1, "")
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("outrider: ")]
    assert len(lines) == 1, done.stderr
    assert done.stderr.splitlines()[-1] == lines[0], "the explanation comes last"
    return lines[0]


def test_a_wrong_configuration_is_refused_at_once(models: Models, tmp_path: Path) -> None:
    """What is found wrong, and how it is said, is in tests/unit (test_config, test_preset, test_cli)."""
    line = refused(write_config(tmp_path, models, target={"tensor_parallel_size": 3}))
    assert "target.tensor_parallel_size: 3 does not divide" in line


@pytest.mark.exhaustive  # tests/unit/test_cli.py has the line, test_sigterm_ends_it_cleanly what is left of a server
def test_what_only_the_engine_finds_out_is_one_line_too(models: Models, tmp_path: Path) -> None:
    """Weights that do not fit their config.json: Ray, Serve and vLLM are up by then, and all of them go again."""
    before = shared_memory_entries()
    broken = tmp_path / "broken"
    shutil.copytree(models.target, broken)
    (broken / "model.safetensors").write_bytes(b"not a checkpoint")
    process = subprocess.Popen(
        command("serve", str(write_config(tmp_path, models, target={"model": str(broken)})),
                "--grpc-port", "0", "--http-port", "0"),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    output, errors = process.communicate(timeout=STARTS_WITHIN_S)
    assert (process.returncode, output) == (1, "")
    assert "Traceback" not in errors
    last = errors.strip().splitlines()[-1]
    print(last)
    assert re.match(r"outrider: target[.\w]*: ", last), last
    left = {name for name in shared_memory_entries() - before if str(process.pid) in name}
    assert left == set()
    assert not [p for p in psutil.process_iter(["ppid"]) if p.info["ppid"] == process.pid]
