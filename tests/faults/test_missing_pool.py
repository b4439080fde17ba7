"""A drafter that cannot be loaded: a pool's target serves, what is waited for is told, and it is tried again. A
target's own ends the start."""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from outrider.deploy.client.sync_client import OutriderClient
from outrider.v1 import generation_pb2 as pb
from tests.support.cluster.outrider_serve import command, outrider_serve, write_config
from tests.support.cluster.serving import HANG_GUARD_S, Models, drafted, engine, num_draft_tokens, wait_until
from tests.support.models.reference import Reference

pytestmark = [pytest.mark.engine, pytest.mark.exhaustive, pytest.mark.timeout(900)]

PROMPT = list(b"to be or not to be, that is the question: to be or not to be")
TRIED_AGAIN_WITHIN_S = 300.0
"""After a minute at most, and it loads its model while requests run."""


DIED = "the drafter's process died while it loaded"
SPECULATION = {"num_speculative_tokens": 8, "adaptive": False}


def pool_of(drafter: Path) -> dict[str, object]:
    return {"method": "draft_model", **engine(drafter), "placement": "pool", "num_drafters": 1}


def test_a_target_serves_while_the_drafter_cannot_load_and_speculates_once_it_can(
    models: Models, tmp_path: Path
) -> None:
    drafter = Path(shutil.copytree(models.drafter, tmp_path / "drafter"))
    weights = drafter / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])  # which nothing looks at before it is loaded
    reference = Reference(models.target)
    with (
        outrider_serve(models, tmp_path / "served", drafter=pool_of(drafter), speculation=SPECULATION) as server,
        OutriderClient(server.grpc) as client,
    ):

        def ask() -> pb.GenerateResponse:
            answer = client.generate(PROMPT, temperature=0.0, max_tokens=100)
            reference.check(PROMPT, answer.token_ids, label="whoever drafts")
            return answer

        assert num_draft_tokens(ask()) == 0
        told = wait_until(
            lambda: [line for line in server.said() if "WARNING: DrafterPool: " in line],
            HANG_GUARD_S,
            "the operator is told",
        )
        print(told[0])
        assert "afetensor" in told[0], "and why"

        weights.write_bytes(whole)
        wait_until(lambda: num_draft_tokens(ask()) > 0, TRIED_AGAIN_WITHIN_S, "an answer with drafts", every_s=1.0)
        drafted(ask)


@contextmanager
def drafters_die() -> Iterator[threading.Event]:
    """Kill drafters as soon as they have begun to load, until the event is set."""
    over = threading.Event()

    def kill() -> None:
        while not over.wait(0.1):
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):
                    if process.cmdline()[:1] and process.cmdline()[0].startswith("ray::Drafter"):
                        process.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        yield over
    finally:
        over.set()
        killer.join()


def test_a_start_ends_whose_own_drafters_process_dies_whenever_it_loads(models: Models, tmp_path: Path) -> None:
    drafter = {"method": "draft_model", **engine(models.drafter)}
    config = write_config(tmp_path, models, drafter=drafter, speculation=SPECULATION)
    with drafters_die():
        done = subprocess.run(
            command("serve", str(config), "--grpc-port", "0", "--http-port", "0"),
            capture_output=True, text=True, timeout=2 * HANG_GUARD_S, check=False, cwd=Path(__file__).parents[2],
        )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    assert DIED in done.stderr.splitlines()[-1], done.stderr[-3000:]
